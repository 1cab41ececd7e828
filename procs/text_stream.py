"""An output's text as it leaves: stop strings, and what is held back for them.

The text of an output is that of its tokens (`token_text`), cut before the stop string that is completed first. A stop
token gives no text, and no part of a stop string ever leaves; streamed pieces joined are the whole text. What has left
after n tokens depends on those n tokens alone, never on how they came in records, so that any state here can be made
again from the ledger. May never do I/O, and never look further back than what is held.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from procs.token_text import TextTable


class StopStrings:
    """An automaton over one request's stop strings (Aho and Corasick 1975, "Efficient string matching"); shared, never
    changed.

    A node is a string that some stop string begins with; `depth` is its length, `match` the length of the longest stop
    string that ends there (0 = none).
    """

    __slots__ = ("depth", "fail", "match", "next", "starts")

    def __init__(self, strings: Iterable[str]) -> None:
        """strings: none of them empty."""
        self.next: list[dict[str, int]] = [{}]
        self.depth = [0]
        self.match = [0]
        for string in strings:
            self._add(string)
        self.starts = frozenset(self.next[0])
        self.fail = [0] * len(self.next)
        order = [0]  # by depth, so that all shorter nodes are linked before a node is
        for node in order:
            for char, child in self.next[node].items():
                order.append(child)
                link = self.fail[child] = self.step(self.fail[node], char) if node else 0
                self.match[child] = self.match[child] or self.match[link]

    def _add(self, string: str) -> None:
        node = 0
        for depth, char in enumerate(string, 1):
            child = self.next[node].get(char)
            if child is None:
                child = len(self.next)
                self.next[node][char] = child
                self.next.append({})
                self.depth.append(depth)
                self.match.append(0)
            node = child
        self.match[node] = len(string)

    def step(self, node: int, char: str) -> int:
        """The node of the longest suffix of (node's string + char) that some stop string begins with."""
        following = self.next
        while True:
            child = following[node].get(char)
            if child is not None:
                return child
            if not node:
                return 0
            node = self.fail[node]


class StopScan:
    """Looks for stop strings in one output's text and holds back the longest end of it that some stop string begins
    with.
    """

    __slots__ = ("_held", "_node", "_stops")

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        self._node = 0
        self._held = ""

    def feed(self, text: str) -> tuple[str, bool]:
        """Returns (text that may leave, whether a stop string is complete).

        Of all stop strings in the text the one that is complete first counts, and of those that end together the
        longest; text is cut where it starts, and nothing may be fed after it.
        """
        stops, node = self._stops, self._node
        if not node and stops.starts.isdisjoint(text):
            return text, False
        joined = self._held + text
        for end, char in enumerate(text, len(self._held) + 1):
            node = stops.step(node, char)
            if stops.match[node]:
                self._held = ""
                return joined[: end - stops.match[node]], True
        safe = len(joined) - stops.depth[node]
        self._node = node
        self._held = joined[safe:]
        return joined[:safe], False

    def flush(self) -> str:
        """Returns what was held back."""
        held, self._held = self._held, ""
        return held


class OutputText:
    """The text of one output as it grows.

    `stop_ids`: tokens that end the output; such a token is counted and gives no text, whether or not it is known yet
    that the output has ended with it. `count`: output tokens taken in. `stop_count`: how many of them it took to
    complete a stop string (0 = none is complete); tokens after that give no text.
    """

    __slots__ = ("_decoder", "_scan", "_stop_ids", "count", "stop_count")

    def __init__(self, table: TextTable, stops: StopStrings | None, stop_ids: Collection[int] = ()) -> None:
        self._stop_ids = frozenset(stop_ids)
        self._decoder = table.decoder()
        self._scan = StopScan(stops) if stops else None
        self.count = 0
        self.stop_count = 0

    def push(self, tokens: Iterable[int]) -> str:
        """Takes in the next tokens; returns the text that may leave now."""
        if self.stop_count:
            return ""
        push, stop_ids = self._decoder.push, self._stop_ids
        pieces: list[str] = []
        for token in tokens:
            self.count += 1
            if token in stop_ids:
                continue
            text = push(token)
            if self._scan and text:
                text, stopped = self._scan.feed(text)
                if stopped:
                    self.stop_count = self.count
                    return "".join(pieces) + text
            pieces.append(text)
        return "".join(pieces)

    def flush(self) -> str:
        """The output has ended: returns what was held back. An incomplete character comes as U+FFFD and may still
        complete a stop string.
        """
        if self.stop_count:
            return ""
        text = self._decoder.flush()
        if self._scan is None:
            return text
        text, stopped = self._scan.feed(text)
        if stopped:
            self.stop_count = self.count
            return text
        return text + self._scan.flush()
