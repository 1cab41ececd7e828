"""Whom a supervisor tells what happens.

Owns the protocol alone: what a report does with it, prints it or draws it, is its own affair.
"""

from __future__ import annotations

from typing import Protocol


class Report(Protocol):
    """Who is told what happens; every call is made in the supervisor's thread."""

    def progress(self, stage: str, text: str) -> None:
        """A stage says what its start is busy with."""

    def ready(self) -> None:
        """Every stage serves."""

    def note(self, text: str) -> None:
        """Something worth a line."""

    def log(self, text: str) -> None:
        """What the server does, now and then."""

    def failed(self, text: str) -> None:
        """The server ended because of this. The last call."""
