"""The warm-up compiles and captures all that a server needs, and computes next to nothing."""

from collections.abc import Iterator
from typing import Any

import pytest

from gpu.device.host import HostDevice
from gpu.kernels import host_step
from gpu.kernels.native import HostKernel
from gpu.lanes import LANES
from gpu.warm_up import WarmUp
from tests.gpu.paged_mill import Bench, reference, small_config

PROMPT = [5, 6, 7, 8, 9]


@pytest.fixture
def bench() -> Iterator[Bench]:
    device = HostDevice()
    yield Bench(device, small_config(poison=True))
    device.close()


def test_every_kernel_of_the_step_has_run_after_it(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host kernel is compiled, or loaded, on its first call."""
    called: set[str] = set()
    call = HostKernel.__call__

    def watched(self: Any, *arguments: Any) -> Any:
        called.add(self._function.__name__)
        return call(self, *arguments)

    monkeypatch.setattr(HostKernel, "__call__", watched)
    assert WarmUp(bench.device, bench.config, bench.program).run() == LANES * len(bench.program.graphs.sizes)
    assert called == {name for name, made in vars(host_step).items() if isinstance(made, HostKernel)}
    assert len(called) == 6


def test_it_computes_a_handful_of_tokens(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[tuple[int, int]] = []
    forward = bench.model.forward

    def counted(tokens: Any, positions: Any, seqs: Any, page_rows: Any, logit_rows: Any, *rest: Any) -> None:
        passes.append((len(tokens), len(logit_rows)))
        forward(tokens, positions, seqs, page_rows, logit_rows, *rest)

    monkeypatch.setattr(bench.model, "forward", counted)
    WarmUp(bench.device, bench.config, bench.program).run()
    assert passes == [(1, 1), (1, 1)]


def test_it_fits_a_server_of_one_running_request() -> None:
    device = HostDevice()
    bench = Bench(device, small_config(max_running=1))
    assert WarmUp(device, bench.config, bench.program).run() == LANES
    device.close()


def test_it_leaves_nothing_behind(bench: Bench) -> None:
    WarmUp(bench.device, bench.config, bench.program).run()
    assert bench.program.relay.length.array[0] == 0
    bench.prompt(0, PROMPT)
    bench.step(slots=bench.fill(1, [1, 2, 3, 4]), chunks=[(1, 0, 0, len(PROMPT), 1)])
    for _ in range(3):
        bench.step(decode=[1])
    bench.device.synchronize()
    assert [step.tokens for step in bench.completed] == [[token] for token in reference(PROMPT, 4)]
