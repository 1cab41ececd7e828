"""An observer that keeps all that it hears, by name, so that what two devices report can be compared."""

from typing import Any


class Log:
    def __init__(self) -> None:
        self.heard: list[tuple[Any, ...]] = []

    def launch(self, stream: Any, name: str, reads: Any, writes: Any) -> None:
        self.heard.append(("launch", stream.name, name, regions(reads), regions(writes)))

    def call(self, stream: Any, completion: Any, reads: Any, writes: Any) -> None:
        self.heard.append(("call", stream.name, completion.name, regions(reads), regions(writes)))

    def record(self, stream: Any, event: Any) -> None:
        self.heard.append(("record", stream.name, event.name))

    def wait(self, stream: Any, event: Any) -> None:
        self.heard.append(("wait", stream.name, event.name))

    def graph_launch(self, stream: Any, graph: Any) -> None:
        self.heard.append(("graph", stream.name))

    def graph_end(self, stream: Any, graph: Any) -> None:
        self.heard.append(("end", stream.name))

    def host_wait(self, event: Any, stream: Any) -> None:
        self.heard.append(("host waits", event.name if event is not None else stream.name))

    def host_saw(self, completion: Any) -> None:
        self.heard.append(("host saw", completion.name))

    def host_access(self, name: str, reads: Any, writes: Any) -> None:
        self.heard.append(("host access", name, regions(reads), regions(writes)))


def regions(declared: Any) -> tuple[tuple[str, int, int], ...]:
    return tuple((region.buffer.name, region.lo, region.hi) for region in declared)
