"""Draws the order of a step: `python -m tools.order_picture FILE.svg`. What it draws is what the program really queues.

Owns the recorder and the drawing. It runs a few steps of the real step program on the host device, with a model that
does nothing, and puts every operation as far left as its stream and the events allow: what stands above each other may
overlap.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from gpu.device.host import HostDevice
from gpu.device.protocol import Completion, Event, Graph, Regions, Stream
from gpu.kernels.host_step import HostStepKernels
from gpu.lanes import ResultSlot, StepSlot
from gpu.order_cost import NoModel
from gpu.step import StepProgram
from shm.records import STEP_DECODE, ResultLayout, StepLayout
from tools.gpu_check_step import small_config

STEPS, SHOWN = 4, (2, 3)  # steps that run, and those that are drawn: N and N+1
ROWS = ("host", "schedule", "forward", "copy")
WIDTHS = {"model": 190}
BOX, GAP, LEFT, TOP, ROW_HEIGHT, BOX_HEIGHT = 84, 14, 96, 40, 92, 34
COLOURS = ("#4c8bf5", "#e8710a")
STYLE = """
text { font: 12px sans-serif; fill: #202124; } .stream { font-weight: bold; } .box text { fill: #fff; }
.line { stroke: #9aa0a6; } .wait { stroke: #5f6368; fill: none; stroke-width: 1.5; } .fence { stroke: #d93025; }
.name { font-size: 11px; fill: #5f6368; } .name.fence { fill: #d93025; stroke: none; }
@media (prefers-color-scheme: dark) {
  text { fill: #e8eaed; } .name { fill: #bdc1c6; } .wait { stroke: #bdc1c6; } .fence { stroke: #f28b82; }
  .name.fence { fill: #f28b82; }
}
"""


@dataclass
class Operation:
    """One box: an operation of a step on a stream, and the records that it waits for."""

    row: str
    name: str
    step: int
    waits: list[tuple[str, int]] = field(default_factory=list)  # event family, operation behind which it was recorded
    x: int = 0

    @property
    def width(self) -> int:
        return WIDTHS.get(self.name, BOX)


class Recorder:
    """An observer that keeps what it hears as operations."""

    def __init__(self) -> None:
        self.step = -1
        self.operations: list[Operation] = []
        self._last: dict[str, int] = {}  # by stream
        self._records: dict[str, int] = {}  # by event
        self._waits: dict[str, list[tuple[str, int]]] = {}  # by stream, of the operation to come

    def _add(self, row: str, name: str) -> None:
        self.operations.append(Operation(row, name, self.step, self._waits.pop(row, [])))
        self._last[row] = len(self.operations) - 1

    def launch(self, stream: Stream, name: str, reads: Regions, writes: Regions) -> None:
        if stream.name in ROWS:
            self._add(stream.name, name)

    def call(self, stream: Stream, completion: Completion, reads: Regions, writes: Regions) -> None:
        self._waits.setdefault("host", []).append(("", self._last[stream.name]))
        self._add("host", completion.name)

    def record(self, stream: Stream, event: Event) -> None:
        if stream.name in self._last:
            self._records[event.name] = self._last[stream.name]

    def wait(self, stream: Stream, event: Event) -> None:
        if event.name in self._records:
            awaited = event.name.rstrip("0123456789"), self._records[event.name]
            self._waits.setdefault(stream.name, []).append(awaited)

    def graph_launch(self, stream: Stream, graph: Graph) -> None: ...

    def graph_end(self, stream: Stream, graph: Graph) -> None: ...

    def host_wait(self, event: Event | None, stream: Stream | None) -> None: ...

    def host_saw(self, completion: Completion) -> None: ...

    def host_access(self, name: str, reads: Regions, writes: Regions) -> None: ...


def record() -> list[Operation]:
    """Run STEPS decode steps, each with a slot write, and return what was queued."""
    config = small_config()
    recorder = Recorder()
    device = HostDevice(recorder)
    layout, results, model = StepLayout(config), ResultLayout(config), NoModel()
    kernels = HostStepKernels.of(config)
    ledger = np.zeros((config.rows, config.max_len), np.int32)
    program = StepProgram(device, config, model, kernels, model.sample, ledger)
    program.capture()
    for step in range(STEPS):
        recorder.step = step
        payload, result = np.zeros(layout.nbytes // 4, np.int32), np.zeros(results.nbytes // 4, np.int32)
        slot = StepSlot.on(device, layout, payload, "step")
        view = slot.view
        view.kind, view.n_decode, view.n_slot_writes = STEP_DECODE, 1, 1
        view.slot_writes[:, 0] = (1, 0, 1)
        program.enqueue(slot, ResultSlot.on(device, results, result, "result"), lambda: None)
    device.close()
    return recorder.operations


def place(operations: list[Operation]) -> None:
    """Give every operation the leftmost x that its stream and its waits allow."""
    free = dict.fromkeys(ROWS, 0)
    for operation in operations:
        ready = [operations[i].x + operations[i].width + GAP for _, i in operation.waits]
        operation.x = max([free[operation.row], *ready])
        free[operation.row] = operation.x + operation.width + GAP


def draw(operations: list[Operation]) -> str:
    """The picture of the steps SHOWN, as SVG."""
    place(operations)
    shown = [i for i, operation in enumerate(operations) if operation.step in SHOWN]
    origin = min(operations[i].x for i in shown) - LEFT
    width = max(operations[i].x + operations[i].width for i in shown) - origin + GAP
    height = TOP + ROW_HEIGHT * len(ROWS)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        'aria-label="Two steps on the streams of the device">',
        f"<style>{STYLE}</style>",
        '<defs><marker id="tip" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">'
        '<path d="M0,0 L8,4 L0,8 z" fill="#80868b"/></marker></defs>',
    ]
    for n, row in enumerate(ROWS):
        y = TOP + ROW_HEIGHT * n + BOX_HEIGHT // 2
        parts.append(f'<text class="stream" x="8" y="{y + 4}">{row}</text>')
        parts.append(f'<line class="line" x1="{LEFT - 10}" y1="{y}" x2="{width}" y2="{y}"/>')
    parts += [_box(operations[i], origin) for i in shown]
    parts += [
        _arrow(operations[i], operations[source], family, origin)
        for i in shown
        for family, source in operations[i].waits
        if source in shown and operations[source].row != operations[i].row
    ]
    return "\n".join([*parts, "</svg>\n"])


def _middle(operation: Operation) -> int:
    return TOP + ROW_HEIGHT * ROWS.index(operation.row) + BOX_HEIGHT // 2


def _box(operation: Operation, origin: int) -> str:
    x, y, width = operation.x - origin, _middle(operation) - BOX_HEIGHT // 2, operation.width
    name = {"begin": "begin (time)", "end": "end (time)"}.get(operation.name, operation.name)
    step = "N" if operation.step == SHOWN[0] else "N+1"
    return (
        f'<g class="box"><title>{name}, step {step}</title>'
        f'<rect x="{x}" y="{y}" width="{width}" height="{BOX_HEIGHT}" rx="5" fill="{COLOURS[operation.step % 2]}"/>'
        f'<text x="{x + width // 2}" y="{y + 15}" text-anchor="middle">{name}</text>'
        f'<text x="{x + width // 2}" y="{y + 29}" text-anchor="middle" style="font-size:10px">{step}</text></g>'
    )


def _arrow(target: Operation, source: Operation, family: str, origin: int) -> str:
    down = _middle(target) > _middle(source)
    shift = BOX_HEIGHT // 2 if down else -BOX_HEIGHT // 2
    x1, y1 = source.x + source.width - origin, _middle(source) + shift
    x2, y2 = target.x - origin, _middle(target) - shift
    kind = " fence" if family == "fence" else ""
    curve = f"M{x1},{y1} C{x1},{(y1 + y2) // 2} {x2},{(y1 + y2) // 2} {x2},{y2}"
    label = f'<text class="name{kind}" x="{(x1 + x2) // 2 + 4}" y="{(y1 + y2) // 2 + 4}">{family}</text>'
    return f'<path class="wait{kind}" d="{curve}" marker-end="url(#tip)"/>{label}'


def main() -> None:
    """Write the picture to the file that the command line names."""
    Path(sys.argv[1]).write_text(draw(record()))


if __name__ == "__main__":
    main()
