"""The scheduler as a process: over real rings, ahead of a slow device, stopped, blocked and killed."""

import os
import signal

import pytest

from shm.control import DRAINING
from shm.ledger import FINISH_ABORT
from shm.trace import Trace, What
from tests.procs.scheduler_rig import scheduler_rig
from tests.procs.simulated_device import tiny_config
from tests.procs.simulated_server import Request


def requests(count: int = 20, max_new: int = 12) -> list[Request]:
    return [Request([at % 3] * (at % 9 + 1), max_new - at % 4, seed=at, ignore_eos=at % 2 == 0) for at in range(count)]


@pytest.mark.parametrize("overlap", [True, False])
def test_serves_over_rings(overlap: bool) -> None:
    config = tiny_config(overlap=overlap, max_running=4, max_queued=40, kv_tokens=64)
    with scheduler_rig(config) as rig:
        crowd = requests()
        rig.send(*crowd)
        rig.finish(*crowd)
        rig.wait(lambda: rig.stats()["conservation_checks_total"] > 0 and rig.stats()["running"] == 0)
        stats = rig.stats()
        assert stats["pages_free"] + stats["pages_cached"] == stats["pages_total"] == 16
        assert stats["finished_total"] == len(crowd) and stats["pages_rows"] == stats["queued"] == 0
        assert stats["steps_total"] == len(rig.steps_run) == stats["decode_steps_total"] + stats["mixed_steps_total"]
        assert rig.steps_run == list(range(1, len(rig.steps_run) + 1))
        spans = Trace(rig.memory.segments["trace"]).read()
        assert {span.what for span in spans} == {What.INTAKE, What.PLAN, What.PUSH, What.WAIT, What.PROCESS}


@pytest.mark.parametrize(("overlap", "behind"), [(True, 1), (False, 0)])
def test_the_next_step_is_queued_before_this_one_ends(overlap: bool, behind: int) -> None:
    with scheduler_rig(tiny_config(overlap=overlap, max_len=64, kv_tokens=256), step_s=0.01) as rig:
        pair = [Request([1], 40), Request([2], 40)]
        rig.send(*pair)
        rig.finish(*pair)
        ahead = sorted(rig.queued_behind)
        assert ahead[-1] == behind
        # The last step has nothing behind it, and on a busy machine a few others may not.
        assert ahead[len(ahead) // 4] == behind


def test_stops_on_sigterm_when_the_steps_in_flight_are_done() -> None:
    with scheduler_rig(tiny_config(max_len=64, kv_tokens=256), step_s=0.05) as rig:
        rig.send(Request([1], 60))
        rig.wait(lambda: len(rig.steps_run) > 2)
        rig.memory.control.state = DRAINING
        rig.process.terminate()
        assert rig.process.wait_exit(3)
        assert rig.process.reap() == 0
        ran = len(rig.steps_run)
        assert ran < 30
        assert rig.ledger.count[0] == ran, "the results of all steps are in the ledger"


def test_stops_on_sigterm_when_idle() -> None:
    with scheduler_rig(tiny_config()) as rig:
        rig.memory.control.state = DRAINING
        rig.process.terminate()
        assert rig.process.wait_exit(3)
        assert rig.process.reap() == 0


def test_a_detokenizer_that_stands_still_holds_nobody_up() -> None:
    with scheduler_rig(tiny_config(max_len=128, kv_tokens=512)) as rig:
        request = Request([1], 120)
        rig.send(request)
        rig.wait(lambda: rig.ledger.done[request.row] == request.generation)
        assert rig.progress.available() == rig.progress.ring.slots < rig.ledger.count[request.row] == 120
        aborted, last = Request([2], 100, abort_after=0), Request([3], 90)
        rig.send(aborted, last)
        rig.wait(lambda: rig.ledger.count[aborted.row] > 3)
        rig.ledger.abort[aborted.row] = aborted.generation
        rig.bells["scheduler"].ring()
        rig.wait(lambda: rig.ledger.done[last.row] == last.generation)
        rig.finish(request, aborted, last)
        assert aborted.finish == FINISH_ABORT


def test_stops_on_sigterm_though_the_detokenizer_stands_still() -> None:
    with scheduler_rig(tiny_config(max_len=128, kv_tokens=256)) as rig:
        request = Request([1], 120)
        rig.send(request)
        rig.wait(lambda: rig.progress.available() == rig.progress.ring.slots)
        rig.memory.control.state = DRAINING
        rig.process.terminate()
        assert rig.process.wait_exit(2)
        assert rig.process.reap() == 0
        count = int(rig.ledger.count[0])
        rig.read()
        assert request.count < count, "nobody made room"


def test_says_everything_before_it_stops() -> None:
    with scheduler_rig(tiny_config(max_len=128, kv_tokens=256)) as rig:
        request = Request([1], 120)
        rig.send(request)
        rig.wait(lambda: rig.ledger.done[request.row] == request.generation)
        rig.memory.control.state = DRAINING
        rig.process.terminate()
        rig.finish(request)
        assert rig.process.wait_exit(2)
        assert rig.process.reap() == 0


def test_who_runs_is_told_while_the_first_step_is_still_running() -> None:
    """A prefill takes long: a request in it must not look as if nothing ran."""
    with scheduler_rig(tiny_config(max_running=2, max_len=64, kv_tokens=256)) as rig:
        go_on = rig.pause_device()
        requests = [Request([i], 3) for i in range(1, 4)]
        rig.send(*requests)
        rig.wait(lambda: (rig.stats()["running"], rig.stats()["queued"]) == (2, 1))
        go_on.set()
        rig.finish(*requests)


def test_aborts_are_seen_while_idle_and_while_running() -> None:
    with scheduler_rig(tiny_config(max_running=1, max_len=64, kv_tokens=256), step_s=0.005) as rig:
        running, queued, last = Request([1], 60, abort_after=0), Request([2], 60, abort_after=0), Request([3], 2)
        rig.send(running, queued, last)
        rig.wait(lambda: len(rig.steps_run) > 3)
        for request in (running, queued):
            rig.ledger.abort[request.row] = request.generation
            rig.bells["scheduler"].ring()
        rig.finish(running, queued, last)
        assert running.finish == queued.finish == FINISH_ABORT
        assert running.count < 30 and queued.count == 0


def test_killed_and_started_again_it_goes_on() -> None:
    config = tiny_config(max_running=4, max_queued=40, kv_tokens=64)
    with scheduler_rig(config, step_s=0.002) as rig:
        crowd = requests()
        rig.send(*crowd)
        for _ in range(3):
            ran = len(rig.steps_run)
            rig.wait(lambda ran=ran: len(rig.steps_run) > ran + 7)
            rig.read()
            os.kill(rig.process.pid, signal.SIGKILL)
            rig.process.reap()
            rig.start()
        rig.finish(*crowd)
        assert rig.steps_run == sorted(set(rig.steps_run)), "no step number is used twice"
        assert rig.stats()["stale_results_total"] <= 6


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize(("memory", "is_sound"), [(1, True), (2, True), (1, False)])
def test_killed_under_load_it_prefills_less_than_a_page_of_each_row(memory: int, is_sound: bool, window: int) -> None:
    """Unless the device's memory is another one by then, or the one before erred."""
    config = tiny_config(max_running=3, max_len=128, kv_tokens=512, window=window, prefill_chunk=64)
    with scheduler_rig(config, step_s=0.002) as rig:
        crowd = [Request([at] * 40, 80) for at in range(3)]
        rig.send(*crowd)
        rig.wait(lambda: all(rig.ledger.count[request.row] > 8 for request in crowd))
        os.kill(rig.process.pid, signal.SIGKILL)
        rig.process.reap()
        before = rig.stats()
        rig.memory.control.set_memory("gpu", memory - 1)
        rig.memory.control.set_memory("scheduler", rig.epoch + (not is_sound))
        rig.start()
        rig.finish(*crowd)
        gained = {name: rig.stats()[name] - before[name] for name in ("prefill_tokens_total", "adopted_pages_total")}
        if memory == 1 and is_sound:
            assert gained["prefill_tokens_total"] <= 3 * (config.page_size + 1) and gained["adopted_pages_total"] >= 30
        else:
            assert gained["prefill_tokens_total"] >= 3 * 48 and not gained["adopted_pages_total"]


def test_a_result_out_of_order_kills_it() -> None:
    with scheduler_rig(tiny_config()) as rig:
        rig.wrong_order = True
        rig.send(Request([1], 3))
        assert rig.process.wait_exit(5)
        assert "result of step 1, record 1; expected step 1, record 0" in rig.process.how_it_ended()
        assert rig.process.reap() == 1


def test_restarts_in_a_row_behind_a_device_that_stands_still() -> None:
    """Each scheduler finds the queue fuller than the one before, and the last one finds it full."""
    with scheduler_rig(tiny_config(max_len=64, kv_tokens=256), step_s=0.0) as rig:
        pause = rig.pause_device()
        request = Request([1], 50)
        rig.send(request)
        for restarts in range(5):
            queued = min(2 * (restarts + 1), rig.queue.ring.slots)
            rig.wait(lambda queued=queued: rig.queue.available() == queued)
            rig.process.kill()
            rig.process.reap()
            rig.start()
        pause.set()
        rig.finish(request)
        assert rig.stats()["stale_results_total"] == rig.queue.ring.slots
