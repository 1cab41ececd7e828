"""Every comparison of the GPU check's kernels is seen to fail: faults are planted, in one process of the interpreter.

Run as a program, this module is a part of the check that plants them and notes what was found of each.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tools.gpu_check import GREEDY, Options, Part, run_part

HOST = Options("host", None, str(GREEDY), True, 2)


def test_what_is_right_passes_and_every_fault_is_found() -> None:
    part = Part("planted", "tests.tools.test_gpu_check_planted", "faults", 100, interpreted=True)
    outcome = run_part(part, HOST, 100)
    assert outcome.status == "passed", outcome.reason
    found: dict[str, Any] = outcome.figures
    right = {name: found.pop(name) for name in list(found) if name.startswith("right")}
    assert len(right) == 7 and not any(right.values()), right
    assert len(found) == 29 and all(found.values()), found


@contextmanager
def changed(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def plant_in_sampling(figures: Any) -> None:
    """Another token, another count, another length; and inputs that say nothing."""
    import numpy as np

    from tools import gpu_check_sampling as checked

    case = checked.Case(40, 2, 4, full=True)
    found = case.accept("cpu", 64)
    (tokens, count, length), rest = found[1], found[2:]
    figures.add("right: acceptance", checked.differing(case, found, case.accept_plainly))
    for name, row in {
        "token": ((tokens[0] ^ 1, *tokens[1:]), count, length),
        "count": (tokens, count + 1, length),
        "length": (tokens, count, length + 1),
    }.items():
        wrong = [found[0], row, *rest]
        figures.add(f"acceptance: {name}", checked.differing(case, wrong, case.accept_plainly))
    case = checked.Case(40, 1, 4)
    drawn = case.sample("cpu", 64)
    figures.add("right: sample", checked.differing(case, drawn, case.sample_plainly))
    figures.add("sample: token", checked.differing(case, [*drawn[:3], (drawn[3][0] ^ 1,)], case.sample_plainly))
    case.wanted[:2] = [case.wanted[0]] * 2
    case.logits[:2] = 1  # greedy, and all the same: any token may be the largest
    unjudged = checked.differing(case, [(9,), (9,), *drawn[2:]], case.sample_plainly)
    figures.add("sample: too little can be judged", unjudged == float("inf"))

    def least(logits: Any, *arguments: Any) -> None:
        arguments[6][:] = int(np.argmin(logits[0]))

    with changed(checked, "sample", least):
        figures.add("sample: forbidden", max(0, next(checked.compare_frequencies("cpu", 4, 64, 1))[1] - 1))


def plant_in_copies(figures: Any) -> None:
    """Copies of too little, of too much, and of what they have to refuse."""
    from tools import gpu_check_kernels as checked

    kernels = checked.TritonStepKernels
    upload, deliver = kernels.upload, kernels.deliver
    figures.add("right: copies", sum(found for _, found in checked.compare_copies("cpu")))

    def one_less(self: Any, slot: Any, payload: Any, descriptor: Any, plane: Any, ids: Any, fault: Any) -> None:
        last = descriptor[slot.used_nbytes // 4 - 1].clone()
        upload(self, slot, payload, descriptor, plane, ids, fault)
        descriptor[slot.used_nbytes // 4 - 1] = last

    def other_ids(self: Any, slot: Any, payload: Any, descriptor: Any, plane: Any, ids: Any, fault: Any) -> None:
        upload(self, slot, payload, descriptor, plane, ids, fault)
        ids[0] += 1

    def never_refused(self: Any, slot: Any, *arrays: Any) -> None:
        slot.chunks[2, 1] = 0
        upload(self, slot, *arrays)

    def one_more(self: Any, outcome: Any, payload: Any, ints: int) -> None:
        deliver(self, outcome, payload, ints + 1)

    for name, method, spoilt, place in (
        ("upload: one less", "upload", one_less, 0),
        ("upload: other ids", "upload", other_ids, 0),
        ("upload: nothing refused", "upload", never_refused, 2),
        ("delivery: one more", "deliver", one_more, 1),
    ):
        with changed(kernels, method, spoilt):
            figures.add(name, [found for _, found in checked.compare_copies("cpu")][place])


def plant_in_drafts(figures: Any) -> None:
    """Look-ups and gains that say nothing, and rows that gain all or nothing of their windows."""
    from tools import gpu_check_kernels as checked
    from tools import gpu_check_ngram as looked_up
    from tools import gpu_check_trained as trained

    figures.add("right: look-up", sum(found for _, found in looked_up.compare_ngram("cpu")))
    figures.add("right: windows", sum(found for _, found in checked.compare_step("cpu", 3)))
    for method in ("look_up", "note_gains"):
        with changed(looked_up.TritonNgramKernels, method, lambda *_, **__: None):
            figures.add(f"ngram: no {method}", min(found for _, found in looked_up.compare_ngram("cpu")))
    figures.add("right: trained drafters", sum(found for _, found in trained.compare_trained("cpu")))
    for place, method in enumerate(("next_tokens", "newest_places", "put_drafts", "keep", "recall", "lay_blocks")):
        with changed(trained.TritonTrainedKernels, method, lambda *_, **__: None):
            figures.add(f"trained: no {method}", [found for _, found in trained.compare_trained("cpu")][place])
    accept = checked.TritonStepKernels.accept
    for place, name in enumerate(("counts", "tokens", "newest", "published")):

        def spoilt(self: Any, rows: Any, targets: Any, gained: Any, *others: Any, place: int = place) -> None:
            accept(self, rows, targets, gained, *others)
            (*gained, others[0])[place].view(-1)[0] += 1

        with changed(checked.TritonStepKernels, "accept", spoilt):
            found = [count for name, count in checked.compare_step("cpu", 3) if name.startswith("acceptance")]
            figures.add(f"acceptance: {name}", min(found))


def plant_in_flashinfer(options: Options, figures: Any) -> None:
    """Stand-ins for FlashInfer: right, with the plan of another pass, one that raises, one that fits nothing, none."""
    from types import SimpleNamespace

    import torch

    from gpu.kernels import flashinfer_attention, plain
    from tools import gpu_check_flashinfer as checked
    from tools.gpu_check_part import Skipped

    class Planned:
        """Attention by the lengths of the plan."""

        needs_host_lengths = True

        def __init__(self, library: Any, shape: Any, own: Any) -> None:
            self.lengths: Any = None

        @staticmethod
        def unsupported(shape: Any, capability: Any) -> str:
            return ""

        def plan(self, lengths: Any, rows: int) -> None:
            self.lengths = torch.ones(rows, dtype=torch.int32)
            self.lengths[: len(lengths)] = torch.from_numpy(lengths)

        def begin(self, page_rows: Any, extents: Any) -> None:
            pass

        def run(self, q: Any, k: Any, v: Any, pages: Any, seqs: Any, positions: Any, extents: Any, out: Any) -> None:
            plain.attention(q, k, v, pages, seqs, self.lengths - 1, extents, out)

    class Stale(Planned):
        def plan(self, lengths: Any, rows: int) -> None:
            if self.lengths is None:
                super().plan(lengths, rows)

    class Raises(Planned):
        def begin(self, page_rows: Any, extents: Any) -> None:
            raise RuntimeError("no kernel image")

    class Unfit(Planned):
        @staticmethod
        def unsupported(shape: Any, capability: Any) -> str:
            return "heads of this size are not supported"

    def outcome(kinds: dict[str, Any], library: Any = None) -> str:
        with changed(flashinfer_attention, "KINDS", kinds), changed(flashinfer_attention, "load", lambda: library):
            try:
                checked.flashinfer(options, SimpleNamespace(add=lambda *_: None))  # type: ignore[arg-type]
            except (AssertionError, Skipped) as problem:
                return f"{type(problem).__name__}: {problem}"
        return ""

    there = (SimpleNamespace(__version__="0"), "")
    figures.add("right: flashinfer", outcome({"planned": Planned}, there))
    said = outcome({"stale": Stale, "raises": Raises, "planned": Planned}, there)
    figures.add("flashinfer: stale plans", "stale, tiny, queued" in said and "stale, tiny, queued once more" in said)
    figures.add("flashinfer: raises", "raises, tiny" in said and "planned" not in said)
    figures.add("flashinfer: unfit", outcome({"unfit": Unfit}, there).startswith("Skipped: FlashInfer supports none"))
    figures.add("flashinfer: none", outcome({"planned": Planned}, (None, "no nvcc")) == "Skipped: no nvcc")


def planted(options: Options, figures: Any) -> None:
    """Everything."""
    from tools.gpu_check_kernels import Made, error

    made = Made("cpu", __import__("torch").float32).normal(3)
    figures.add("error: another number", error(made + 1, made))
    figures.add("error: not finite", error(made / 0, made) == float("inf"))
    figures.add("error: nan", error(made * float("nan"), made) == float("inf"))
    plant_in_sampling(figures)
    plant_in_copies(figures)
    plant_in_drafts(figures)
    plant_in_flashinfer(options, figures)


if __name__ == "__main__":
    from tools.gpu_check_part import run

    run({"planted": planted})
