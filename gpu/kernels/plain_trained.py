"""Plain reference of what trained drafters take out of a pass and put into it: row by row. See `TrainedKernels`."""

from typing import Any

from gpu.kernels.step_kernels import PassShape, Rows

Array = Any  # numpy.ndarray


def put_drafts(logits: Array, vocabulary: Array, target: Array, window: int, place: int, each: int) -> None:
    """The likeliest tokens of each window."""
    for r, row in enumerate(logits.tolist()):
        target[r // each * window + place + r % each] = vocabulary[row.index(max(row))]


def recall(kept: Array, rows: Rows, shape: PassShape, states: Array) -> None:
    """States of decode rows."""
    each = len(states) // max(1, shape.decode)
    for i, entry in enumerate(rows.entries[: shape.decode].tolist()):
        states[i * each : (i + 1) * each, 0] = kept[entry]


def keep(kept: Array, entries: Array, residual: Array, places: Array) -> None:
    """What each gaining row begins its next step with."""
    for i, entry in enumerate(entries.tolist()):
        if entry:
            kept[entry] = residual[places[i]]


def next_tokens(rows: Rows, targets: Array, tails: Array, shape: PassShape, out: Array) -> None:
    """The token behind each token of a pass."""
    said = [max(target, 0) for target in targets[: shape.samples].tolist()]
    behind = said[: shape.decode * shape.window]
    lasts = said[len(behind) :]
    for c in range(shape.chunks):
        begin, end = rows.starts[shape.decode + c], rows.starts[shape.decode + c + 1]
        tail = int(tails[c])
        behind += [*rows.tokens[begin + 1 : end].tolist(), tail if tail >= 0 else lasts.pop(0)]
    out[: shape.tokens] = behind


def newest_places(counts: Array, rows: Rows, shape: PassShape, out: Array) -> None:
    """Where each gaining row's newest token stands."""
    decoded = [i * shape.window + int(counts[i]) - 1 for i in range(shape.decode)]
    first = shape.decode * shape.window
    out[: shape.gainers] = decoded + rows.logit_rows[first : first + shape.lasts].tolist()


def lay_blocks(rows: Rows, shape: PassShape, mask: int, blocks: Array, last_seen: Array, wanted: Array) -> None:
    """A block of each decode row."""
    places = []
    for t in range(shape.decode * shape.window):
        place = t % shape.window
        blocks[t] = mask + place - 1 if place else rows.tokens[t]
        last_seen[t] = rows.positions[t] + shape.window - 1 - place
        places += [t] if place else []
    wanted[: len(places)] = places
