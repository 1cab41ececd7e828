"""The gpu process and the scheduler die, at any step, again and again: no token differs, who kills them is found."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from procs.child_specs import ChildSpec
from procs.sched_recovery import recover
from procs.sched_steps import Flight, Steps
from shm.config import ServerConfig
from shm.ledger import FINISH_ERROR, FINISH_NONE
from shm.limits import DEATHS_IN_A_ROW, STABLE_SECONDS, STEPS_IN_FLIGHT
from shm.records import StepView
from tests.procs.simulated_device import SimulatedDevice, tiny_config
from tests.procs.simulated_server import Request, SimulatedServer


class Killed(Exception):
    """The scheduler is dead."""


class MortalServer(SimulatedServer):
    """A server whose gpu process dies of `poison`, and when `kill_gpu` is called. Deaths are seen as the scheduler sees
    them: steps that were not run come back as dropped, and the epoch is another one.
    """

    def __init__(
        self,
        config: Any,
        requests: list[Request],
        lazy: str,
        poison: tuple[int, ...] = (),
        keeps_memory: bool = False,
    ) -> None:
        super().__init__(config, requests, lazy)
        self.poison = [requests[i] for i in poison]
        self.epoch = self.known_epoch = 1
        self.keeps_memory = keeps_memory
        self.stamps: dict[int, int] = {}  # step -> the epoch that it was planned for
        self.deaths = 0

    def kill_gpu(self) -> None:
        self.deaths += 1
        self.streak += not self.in_a_row
        self.epoch += 1
        before = self.device
        self.device = SimulatedDevice(self.config, self.ledger, self.salt)
        if self.keeps_memory:
            self.device.content = before.content
        else:
            self.memory = self.epoch
        self.results.extend([None] * len(self.queued))  # type: ignore[list-item]
        self.queued.clear()
        self.stale.clear()

    def restart_scheduler(self) -> None:
        self.known_epoch = self.epoch
        super().restart_scheduler()

    def one_turn(self) -> None:
        self._arrive_and_abort()
        for request in self.intake:
            self.rows.enqueue(request.row, request.generation)
        self.intake.clear()
        self.rows.observe()
        self._read_progress()
        self._check_flags()
        in_flight = self.steps.in_flight
        depth = STEPS_IN_FLIGHT if self.config.overlap else 1
        if not in_flight:
            self._meet()
        pushed = len(in_flight) < depth and self._plan()
        if len(in_flight) == depth or (in_flight and not pushed):
            while not self.results:
                self._run_step()
            result = self.results.popleft()
            if result is None:
                self._meet()
                self.steps.drop()
            else:
                self.steps.apply(result)
            self._read_progress()
        if self.known_epoch == self.epoch:
            self._audit()
        self.turn += 1

    def _meet(self) -> None:
        if self.known_epoch != self.epoch:
            self.known_epoch = self.epoch
            self.steps.lose_device(self.memory, self.streak)

    def _plan(self) -> bool:
        self.stamps[self.step + 1] = self.known_epoch
        return super()._plan()

    def _run_step(self, check: bool = True) -> None:
        if self.stale:
            self._run_stale()
        elif self.stamps[self.queued[0][0].step] != self.epoch:
            self.queued.popleft()
            self.results.append(None)  # type: ignore[arg-type]
        elif any(self._has(self.queued[0][0], self.queued[0][1], request) for request in self.poison):
            self.kill_gpu()
        else:
            super()._run_step(check)

    def _has(self, flight: Flight, view: StepView, request: Request) -> bool:
        """Whether the row is in the step, in whatever capacity."""
        if request.finish != FINISH_NONE or request.row < 0:
            return False
        state = self.rows.state
        alive = state.incarnation[flight.entries] == flight.incarnations
        rows = set(state.row[flight.entries[alive]].tolist()) | set(view.chunks[1, : view.n_chunks].tolist())
        return request.row in rows and self.by_row.get(request.row) is request

    def _check_end(self, request: Request) -> None:
        if request not in self.poison:
            super()._check_end(request)
            return
        assert request.finish == FINISH_ERROR
        outputs, _ = request.natural_end(self.config.max_len, self.salt)
        assert request.outputs == outputs[: request.count]


def requests() -> list[Request]:
    return [
        Request([1] * 9, 7, arrival=0),
        Request([1, 2], 12, arrival=0, seed=1, ignore_eos=False),
        Request([2] * 5, 9, arrival=2),
        Request([1] * 10, 9, arrival=3),
        Request([0], 5, arrival=4, stop_ids=(7, 9, 20, 21, 22)),
    ]


CONFIGS = st.sampled_from([{}, {"window": 3}, {"overlap": False}])


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(["0", "1", "10"]), st.sampled_from([32, 64]), CONFIGS, st.booleans())
def test_deaths_of_either_change_no_token(
    seed: int, lazy: str, kv_tokens: int, more: dict[str, Any], keeps_memory: bool
) -> None:
    """Deaths come at any turn, but not so often that nobody ever gets on. keeps_memory: a device that is new has the
    pages of the one before.
    """
    chance = random.Random(seed)
    config = tiny_config(kv_tokens=kv_tokens, max_len=24, **more)
    server = MortalServer(config, requests(), lazy, keeps_memory=keeps_memory)
    last = 0
    while any(request.finish == FINISH_NONE for request in server.requests):
        assert server.turn < 3000
        server.one_turn()
        if server.turn > last + 12 and chance.random() < 0.2:
            last = server.turn
            for kill in chance.sample([server.kill_gpu, server.restart_scheduler], chance.randint(1, 2)):
                kill()
    assert server.total("poison_total") == 0
    server.run()


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["0", "1", "10"]), st.sets(st.integers(0, 4), max_size=3), CONFIGS)
def test_who_kills_the_gpu_is_found_and_the_others_go_on(lazy: str, poison: set[int], more: dict[str, Any]) -> None:
    server = MortalServer(tiny_config(max_len=24, **more), requests(), lazy, tuple(poison))
    server.run()
    assert {request.finish == FINISH_ERROR for request in server.poison} <= {True}
    assert server.total("poison_total") == len(poison)
    assert server.deaths <= 3 * len(poison), "two in company, one alone"


def test_alone_two_deaths_suffice() -> None:
    server = MortalServer(tiny_config(), [Request([1] * 9, 7)], "1", (0,))
    server.run()
    assert server.deaths == 2


def test_who_breaks_decode_steps_is_found_too() -> None:
    """A prefill gives it a token in every life: that is no progress."""
    server = MortalServer(tiny_config(), requests(), "1", (1,))
    plain = server._has

    def decodes(flight: Flight, view: StepView, request: Request) -> bool:
        rows = server.rows.state.row[flight.entries[: flight.decodes]]
        return plain(flight, view, request) and request.row in rows.tolist()

    server._has = decodes  # type: ignore[method-assign]
    server.run()
    assert server.total("poison_total") == 1 and server.deaths <= 4


@pytest.mark.parametrize("lazy", ["0", "1"])
def test_who_kills_the_scheduler_is_found(lazy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    server = MortalServer(tiny_config(), requests(), lazy)
    killer = server.requests[2]
    server.poison = [killer]
    server._has = lambda *_: False  # type: ignore[method-assign]
    plain = Steps.apply

    def apply(self: Steps, result: Any) -> Flight:
        flight = self.in_flight[0]
        rows = set(self.state.row[flight.entries].tolist()) | set(self.state.row[flight.chunk_entries].tolist())
        if killer.row in rows and killer.finish == FINISH_NONE and server.by_row.get(killer.row) is killer:
            raise Killed
        return plain(self, result)

    monkeypatch.setattr(Steps, "apply", apply)
    deaths = 0
    while any(request.finish == FINISH_NONE for request in server.requests):
        assert server.turn < 1000 and deaths < 5
        try:
            server.one_turn()
        except Killed:
            deaths += 1
            server.restart_scheduler()
    assert killer.finish == FINISH_ERROR and deaths == 3


def ample() -> ServerConfig:
    """Room for eight rows, which are all back in the batch one step after a death."""
    return tiny_config(max_len=128, kv_tokens=2048, max_running=8, prefill_chunk=1024)


class GetsOn(MortalServer):
    """Its gpu process dies of a poison in every eighth step that has it, all times in a row."""

    def __init__(self, requests: list[Request], poison: tuple[int, ...]) -> None:
        super().__init__(ample(), requests, "1", poison)
        self.in_a_row = True
        self.seen = Counter[int]()

    def kill_gpu(self) -> None:
        self.seen.clear()
        super().kill_gpu()

    def _has(self, flight: Flight, view: StepView, request: Request) -> bool:
        self.seen[request.row] += super()._has(flight, view, request)
        return self.seen[request.row] == 8


def eight() -> list[Request]:
    return [Request([i % 3], 80, seed=i) for i in range(8)]


@pytest.mark.parametrize("poison", [(0,), (5,)])
def test_who_gets_on_between_deaths_in_a_row_is_found_too_and_nobody_else(poison: tuple[int, ...]) -> None:
    server = GetsOn(eight(), poison).run()
    assert server.total("poison_total") == 1 and server.poison[0].count > 0
    assert server.deaths == DEATHS_IN_A_ROW + 1, "some in company, and one alone"
    assert server.ledger.gpu_in_a_row[server.poison[0].row] == server.deaths


def test_two_that_get_on_are_found_before_the_deaths_are_too_many() -> None:
    server = GetsOn(eight(), (2, 5)).run()
    assert server.total("poison_total") == 2
    assert server.deaths <= ChildSpec.deaths_in_a_row_max


def test_alone_it_is_given_up_no_sooner() -> None:
    server = GetsOn([Request([1], 80)], (0,)).run()
    assert server.deaths == DEATHS_IN_A_ROW + 1


def test_deaths_that_are_not_in_a_row_are_forgiven() -> None:
    server = MortalServer(ample(), eight(), "1")
    while any(request.finish == FINISH_NONE for request in server.requests):
        server.one_turn()
        if server.turn % 12 == 0:
            server.kill_gpu()
    assert server.deaths > DEATHS_IN_A_ROW and server.total("poison_total") == 0


def killed_in_a_row(server: MortalServer, deaths: int) -> None:
    """The gpu process, while everybody is in the running step, and everybody has got on since the last time."""
    for _ in range(deaths):
        for _ in range(12):
            server.one_turn()
        server.kill_gpu()
    server.one_turn()


def test_a_suspect_is_one_until_the_stage_has_served_for_long_enough_with_it_alone() -> None:
    now_s = 5.0
    server = MortalServer(tiny_config(max_len=512, kv_tokens=2048), [Request([1], 300), Request([2], 300)], "1")
    server.in_a_row = True
    server.rows.quarantine._clock_s = lambda: now_s
    killed_in_a_row(server, DEATHS_IN_A_ROW - 1)
    assert not server.rows.quarantine.suspects
    killed_in_a_row(server, 1)
    assert server.rows.quarantine.suspects == {request.row for request in server.requests}
    for _ in range(20):
        server.one_turn()
        assert server.rows.state.running == 1
    server.restart_scheduler()
    assert len(server.rows.quarantine.suspects) == 2, "the next scheduler knows"
    server.rows.quarantine._clock_s = lambda: now_s
    for left in (1, 0):
        for _ in range(6):
            server.one_turn()
        assert server.rows.state.running == 1
        now_s += STABLE_SECONDS
        while len(server.rows.quarantine.suspects) > left:
            server.one_turn()
    server.one_turn()
    assert server.rows.state.running == 2 and not server.ledger.gpu_in_a_row.any()
    server.run()


@pytest.mark.parametrize("alone", [False, True])
def test_a_scheduler_s_deaths_in_a_row(alone: bool) -> None:
    """It dies again and again while the one request is there; which of two it is shows once they are apart."""
    server = MortalServer(
        tiny_config(max_len=64, kv_tokens=256), [Request([1], 50), Request([2], 50)][: 2 - alone], "1"
    )
    server.in_a_row = True
    server.poison = server.requests[:1]
    server._has = lambda *_: False  # type: ignore[method-assign]
    deaths = 0
    while server.poison[0].finish == FINISH_NONE:
        assert server.turn < 1000
        for _ in range(8):
            server.one_turn()
        if server.by_row.get(server.poison[0].row) is server.poison[0]:
            deaths += 1
            server.restart_scheduler()
    assert deaths == DEATHS_IN_A_ROW + 1 and server.total("poison_total") == 1
    server.run()


def test_a_scheduler_that_waits_for_the_device_dies_of_nobody() -> None:
    """The gpu process may be away for seconds: schedulers that die meanwhile say nothing about the only request."""
    server = MortalServer(tiny_config(), [Request([1] * 9, 7)], "1")
    server.one_turn()
    for _ in range(5):
        while server.queued:
            SimulatedServer._run_step(server, check=False)
        server.results.clear()
        server.start_scheduler()
        recover(server.rows, server.streak, at_work=False)
        server._read_progress()
        server.one_turn()
    server.run()
    assert server.total("poison_total") == 0


def test_a_scheduler_that_takes_new_memory_for_the_old_one_is_noticed() -> None:
    """The negative control of everything above: it finds prefixes that nobody has written."""
    server = MortalServer(tiny_config(max_len=24), requests(), "1")
    with pytest.raises(AssertionError, match=r"holds another token|differs"):
        while True:
            server.one_turn()
            if server.turn % 9 == 0:
                server.kill_gpu()
                server.memory = 1
