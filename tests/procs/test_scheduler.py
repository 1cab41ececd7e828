"""What the scheduler puts into descriptors, how far it reserves, and whom it serves when."""

import numpy as np
import pytest

from procs import policy
from procs.batch_state import BatchState
from shm.config import ServerConfig
from shm.ledger import FINISH_ABORT, FINISH_LENGTH, FINISH_STOP
from shm.records import ResultLayout, StepLayout, StepView
from tests.procs.simulated_device import tiny_config
from tests.procs.simulated_server import UNWRITTEN, Request, SimulatedServer


def arrivals(seed: int = 5) -> list[Request]:
    rng = np.random.default_rng(seed)
    return [
        Request(
            rng.integers(0, 40, rng.integers(3, 20)).tolist(), int(rng.integers(1, 14)), arrival=int(rng.integers(0, 9))
        )
        for _ in range(9)
    ]


def read_step(config: ServerConfig, raw: bytes) -> StepView:
    payload = np.full(StepLayout(config).nbytes // 4, UNWRITTEN, dtype=np.int32)
    payload[: len(raw) // 4] = np.frombuffer(raw, dtype=np.int32)
    return StepLayout(config).view(payload)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("kv_tokens", [36, 200])
def test_descriptors_hold_nothing_that_the_device_computes(overlap: bool, kv_tokens: int) -> None:
    """Two models that answer differently get the same bytes: no token of a running request is in any of them."""
    config = tiny_config(overlap=overlap, kv_tokens=kv_tokens, max_len=32, max_running=4)
    first = SimulatedServer(config, arrivals(), salt=0).run()
    second = SimulatedServer(config, arrivals(), salt=1).run()
    outputs = [[request.outputs for request in server.requests] for server in (first, second)]
    assert outputs[0] != outputs[1]
    assert first.descriptors == second.descriptors
    assert (first.total("retractions_total") > 0) == (kv_tokens == 36)


def test_a_decode_row_is_an_entry_number_and_nothing_else() -> None:
    config = tiny_config(max_len=32)
    server = SimulatedServer(config, arrivals())
    server.run()
    entries: set[int] = set()
    only_decoding = 0
    for raw in server.descriptors:
        view = read_step(config, raw)
        entries |= set(view.decode_entries[: view.n_decode].tolist())
        if view.n_chunks == view.n_slot_writes == view.n_sampling == 0:
            only_decoding += 1
            view.decode_entries[: view.n_decode] = UNWRITTEN
            view.n_decode = view.step = 0
            assert set(view.header.tolist()) <= {0, UNWRITTEN}
            rest = (view.decode_entries, view.chunks, view.sampling)
            assert all((section == UNWRITTEN).all() for section in rest), "something else was written"
    assert entries == set(range(1, config.max_running + 1))
    assert only_decoding > 5


def run_windows(gains: list[int]) -> list[tuple[int, int]]:
    """One request of 100 tokens in windows of 4 and pages of 1: (counted, reserved) as each decode step is planned."""
    config = tiny_config(window=4, page_size=1, max_len=200, kv_tokens=256, prefill_chunk=128, max_running=1)
    server = SimulatedServer(config, [])
    Request([1] * 100, 90).write(server.ledger, 0)
    server.rows.enqueue(0, 1)
    result = ResultLayout(config).view(np.full(ResultLayout(config).nbytes // 4, -1, dtype=np.int32))
    view = StepLayout(config).view(np.zeros(StepLayout(config).nbytes // 4, dtype=np.int32))
    state = server.rows.state

    def process(gain: int) -> None:
        result.n_rows, result.window, result.counts[0], result.tokens[:gain, 0] = 1, 4, gain, 9
        server.steps.apply(result)

    assert server.steps.plan(view, 0) is not None and view.n_chunks == 1
    process(1)
    seen = []
    for step in range(1, len(gains) + 1):
        if step > 2:
            process(gains[step - 3])
        assert server.steps.plan(view, step) is not None
        seen.append((int(state.counted[1]), int(state.page_count[1])))
    return seen


def test_two_windows_are_reserved_as_in_figure_7() -> None:
    """The example of the article: in step 3 the device writes its window exactly up to the last reserved slot."""
    gains = [3, 4, 1, 2]
    seen = run_windows(gains)
    assert seen == [(100, 108), (100, 108), (103, 111), (107, 115)]
    lengths = np.cumsum([100, *gains[:-1]])
    ends = (lengths + 4).tolist()  # one beyond the last position that each step writes
    assert ends == [104, 107, 111, 112]
    assert all(end <= reserved for end, (_, reserved) in zip(ends, seen, strict=True))
    assert ends[2] == seen[2][1]


def test_one_window_would_not_be_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_window(state: BatchState, rows: np.ndarray) -> np.ndarray:
        return np.maximum(state.counted[rows] + state.window - state.page_count[rows], 0)

    monkeypatch.setattr(policy, "pages_wanted", one_window)
    monkeypatch.setattr(policy, "pages_for_prompt", lambda state, fill: fill + state.window)
    seen = run_windows([4, 4, 4])
    assert seen[1][1] < 108, "step 2 writes 104 to 107"


def test_no_step_is_wasted_on_a_limit_that_is_certain() -> None:
    server = SimulatedServer(tiny_config(), [Request([1, 2], 5), Request([3], 1, arrival=1)]).run()
    assert server.total("surplus_tokens_total") == 0
    assert [request.count for request in server.requests] == [5, 1]


@pytest.mark.parametrize(("overlap", "surplus"), [(True, 1), (False, 0)])
def test_a_stop_id_is_kept_and_noticed_one_step_late(overlap: bool, surplus: int) -> None:
    outputs, _ = Request([1, 2], 9).natural_end(32)
    stop = outputs[4]
    server = SimulatedServer(tiny_config(overlap=overlap), [Request([1, 2], 9, stop_ids=(stop,))]).run()
    (request,) = server.requests
    assert request.outputs == outputs[: outputs.index(stop) + 1]
    assert request.finish == FINISH_STOP
    assert server.total("surplus_tokens_total") == surplus


@pytest.mark.parametrize("prompt", [1, 30, 31])
def test_the_last_position_of_a_row_can_be_used(prompt: int) -> None:
    server = SimulatedServer(tiny_config(kv_tokens=36), [Request([1] * prompt, 99)]).run()
    assert server.requests[0].count == 32 - prompt
    assert server.requests[0].finish == FINISH_LENGTH


@pytest.mark.parametrize("turns", range(12))
def test_abort_in_every_phase(turns: int) -> None:
    """Queued behind a full batch, between chunks, behind the last chunk, running: it ends, and emits nothing more."""
    config = tiny_config(max_running=1, prefill_chunk=4)
    server = SimulatedServer(
        config, [Request([1] * 3, 2), Request([2] * 14, 3, abort_after=turns), Request([3], 2)]
    ).run()
    assert server.requests[1].finish in (FINISH_ABORT, FINISH_LENGTH)
    assert server.requests[1].finish == FINISH_ABORT or turns > 8
    assert [server.requests[at].finish for at in (0, 2)] == [FINISH_LENGTH] * 2


def test_a_row_aborted_before_it_was_ready_has_no_prompt() -> None:
    server = SimulatedServer(tiny_config(), [Request([], 1, abort_after=0)])
    server.one_turn()
    assert server.requests[0].finish == FINISH_ABORT and not server.steps.in_flight


def test_abort_of_a_retracted_request() -> None:
    config = tiny_config(kv_tokens=32, max_len=20, max_running=2)
    server = SimulatedServer(config, [Request([1, 1, 1], 15), Request([2, 2], 16)])
    while not server.total("retractions_total"):
        server.one_turn()
    (row,) = server.rows.waiting
    request = server.by_row[row]
    assert 0 < request.count < 15
    request.abort_after = 0
    server.one_turn()
    assert request.finish == FINISH_ABORT
    server.run()


def test_a_retracted_request_is_first_in_the_queue() -> None:
    config = tiny_config(kv_tokens=32, max_len=20, max_running=2)
    server = SimulatedServer(config, [Request([1, 1, 1], 15), Request([2, 2], 16), Request([3], 3, arrival=2)])
    while not server.total("retractions_total"):
        server.one_turn()
    retracted, behind = server.rows.waiting
    assert server.by_row[retracted].count > 0
    assert server.by_row[behind] is server.requests[2]
    server.run()


def test_requests_share_a_prompt_that_is_still_being_used() -> None:
    prompt = [7] * 17
    server = SimulatedServer(tiny_config(kv_tokens=128), [Request(prompt, 12), Request(prompt, 3, arrival=8)]).run()
    assert server.total("prefix_hit_tokens_total") == 16


def test_a_conversation_finds_its_last_answer() -> None:
    first = Request([5] * 6, 9)
    answer = first.natural_end(32)[0]
    server = SimulatedServer(
        tiny_config(kv_tokens=128), [first, Request([5] * 6 + answer + [1, 2], 3, arrival=30)]
    ).run()
    assert server.total("prefix_hit_tokens_total") == 12  # 14 tokens of the first were counted: 3 pages of 4


def test_prompts_share_the_budget_of_a_step() -> None:
    config = tiny_config(prefill_chunk=8, kv_tokens=200)
    server = SimulatedServer(config, [Request([1] * 3, 4), Request([2] * 11, 4), Request([3] * 2, 4)])
    for _ in range(3):
        server.one_turn()
    chunks = []
    for raw in server.descriptors:
        view = read_step(config, raw)
        chunks.append((view.n_decode, [tuple(chunk[2:5]) for chunk in view.chunks[:, : view.n_chunks].T.tolist()]))
    assert chunks[:3] == [(0, [(0, 3, 1), (0, 5, 0)]), (1, [(5, 6, 1), (0, 2, 1)]), (3, [])]
    server.run()


def test_admission_waits_when_the_slot_writes_run_out() -> None:
    """Rows that find their whole prompt cached cost the step one token each, and a slot write for every page."""
    config = tiny_config(max_running=16, max_queued=16, page_size=1, max_len=64, kv_tokens=2000, prefill_chunk=100)
    requests = [Request([9] * 60, 2), *(Request([9] * 60, 2, arrival=10) for _ in range(16))]
    server = SimulatedServer(config, requests).run()
    cap = StepLayout(config).slot_write_cap
    views = [read_step(config, raw) for raw in server.descriptors]
    assert max(view.n_slot_writes for view in views) <= cap < 16 * 62
    assert max(view.n_sampling for view in views) == cap // 62
    assert all(request.count == 2 for request in server.requests)


def test_a_lone_request_fits_beside_its_own_copy_in_the_cache() -> None:
    """It computes the last page of its prompt although that is cached, and must not keep both."""
    config = tiny_config(max_running=1, max_queued=0, kv_tokens=12, max_len=9, overlap=False)
    SimulatedServer(config, [Request([0] * 4, 1), Request([0] * 4, 5)]).run()
