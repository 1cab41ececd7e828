"""A stand-in for setproctitle where it cannot be installed: processes keep the name that they have."""


def setproctitle(title: str) -> None:
    """Leave the name of the process as it is."""
