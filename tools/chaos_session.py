"""A run under faults, step by step: a server, its answers without faults, then kills under load and what came of them.

Owns the server that it starts (as a subprocess, never imported) and the order of what happens to it. What it sees goes
into `chaos_report` as phases; it decides nothing about them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import orjson

from shm.faults import VARIABLE
from tools.bench_serve import BenchError, Server, get, start, stop
from tools.chaos_check import check
from tools.chaos_history import History
from tools.chaos_kill import Death, Kill, Strike, Victim, find
from tools.chaos_load import Load, Told
from tools.chaos_processes import (
    SUPERVISOR,
    Holdings,
    Leaks,
    below,
    holdings_of,
    is_complete,
    is_free,
    is_idle,
    leaks_between,
    living,
    restarts_of,
    samples,
)
from tools.chaos_report import Phase, Story, lines_in
from tools.chaos_requests import Request, in_turn, probe_of, requests_of, with_stop

SETTLE_S = 20.0  # after a load, for the server to become idle and to hold what it held before, standbys included
BURIAL_S = 2.0  # for the processes of a server that has ended to be gone
LOOK_S = 0.005  # between two looks at whether a successor is there
AGAIN_S = 0.05  # between two probes
CALM_S = 0.2  # between two that are not to disturb
LINES_S = 0.5  # behind the last kill, for the log to tell of it
CUTTERS = ("frontend", SUPERVISOR)  # whose death ends connections


class Session:
    """One run. Use as a context manager: whatever happens, the server that it started is ended."""

    def __init__(
        self,
        arguments: str,
        *,
        streams: int,
        api_key: str | None,
        timeout_s: float,
        bound_s: float,
        plant: str = "",
        log: Path | None = None,
    ) -> None:
        """arguments: of `stepahead serve`. timeout_s: of a request; bound_s: from a kill to its recovery.

        plant: what `shm.faults.VARIABLE` is set to for it. log: where its lines are kept; otherwise they go with it.
        """
        self._arguments = arguments
        self._streams = streams
        self._api_key = api_key
        self._timeout_s = timeout_s
        self._bound_s = bound_s
        self._env: Mapping[str, str] | None = {**os.environ, VARIABLE: plant} if plant else None
        self._keeps_log = log is not None
        self._log = log or Path(tempfile.mkstemp(prefix="stepahead-chaos-", suffix=".log")[1])
        self._server: Server | None = None
        self._requests: list[Request] = []
        self._probe: Request | None = None
        self._calm: dict[int, History] = {}  # by number of the request

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self._end_server()
        if not self._keeps_log:
            self._log.unlink(missing_ok=True)

    @property
    def server(self) -> Server:
        """The server that runs; a new one if there is none. Raises BenchError, with the server's last words."""
        if self._server is None:
            with self._log.open("ab") as log:
                try:
                    self._server = start(self._arguments, self._api_key, log, self._env)
                except BenchError as error:
                    words = self._log.read_text(errors="replace").strip().splitlines()
                    raise BenchError(f"{error}; its last line: {words[-1] if words else 'none'}") from error
        return self._server

    @property
    def _supervisor(self) -> int:
        assert self.server.process is not None
        return self.server.process.pid

    @property
    def _has_ended(self) -> bool:
        return self._server is None or self._server.process is None or self._server.process.poll() is not None

    async def baseline(
        self, seed: int, prompts: Sequence[str], count: int, tokens: int, advance: Callable[[], None]
    ) -> list[Story]:
        """Ask everything once without faults; that is what later answers are compared with. Raises BenchError."""
        card = orjson.loads(get(f"{self.server.url}/v1/models", self._api_key))["data"][0]
        max_len = int(card.get("max_model_len") or 2048)
        self._requests = requests_of(seed, count, self.server.model, prompts, max_len, tokens)
        self._probe = probe_of(count, self.server.model)
        stories = await self._ask_calmly([*self._requests, self._probe], advance)
        # What a stop string has to be is known only now.
        texts = {n: "".join(event.text for event in calm.events) for n, calm in self._calm.items()}
        stopping = [with_stop(one, texts[one.number]) for one in self._requests if "stop" in one.kind]
        stories += await self._ask_calmly(stopping, lambda: None)
        by_number = {one.number: one for one in stopping}
        self._requests = [by_number.get(one.number, one) for one in self._requests]
        return stories

    async def phase(self, kills: Sequence[Kill], seed: str, advance: Callable[[], None]) -> Phase:
        """Put the server under load, kill as planned, wait until all is answered, and count what is left behind.

        Without kills every request is asked once more, and probes beside them. `advance()` is called after each kill,
        or else each answer.
        """
        metrics = await self._complete()
        before, restarts, said = holdings_of(self._supervisor, metrics), restarts_of(metrics), self._log.stat().st_size
        turns = in_turn(self._requests, seed)
        source = turns if kills else (next(turns) for _ in self._requests)
        load = Load(self.server.url, self._api_key, source, self._streams, self._timeout_s)
        phase = Phase(kills)
        load.start(lambda: None if kills else advance())
        try:
            if not kills:
                await self._probe_calmly(load, phase)
            for kill in kills:
                await asyncio.sleep(kill.wait_s)
                strike = await self._strike(load, kill, phase)
                advance()
                if strike is None or not strike.recovered_ns:
                    break
            if kills:
                load.stop()
            if len(phase.strikes) < len(kills) or not all(strike.recovered_ns for strike in phase.strikes):
                load.abandon()
        except BaseException:  # whoever ends this run waits for no answer
            load.abandon()
            raise
        finally:
            told = await load.finish()
        phase.stories = self._judge(told, phase.strikes)
        await self._look_behind(phase, before, restarts, said)
        return phase

    async def supervisor_phase(self, kill: Kill, seed: str) -> Phase:
        """Kill the supervisor of a server under load: every stream ends, and nothing is left."""
        server, supervisor = self.server, self._supervisor
        assert server.process is not None
        load = Load(server.url, self._api_key, in_turn(self._requests, seed), self._streams, self._timeout_s)
        phase = Phase([kill])
        load.start()
        try:
            await asyncio.sleep(kill.wait_s)
            children = below(supervisor)
            death = Death(SUPERVISOR, kill.cell.how, supervisor)
            with contextlib.closing(Victim(SUPERVISOR, supervisor)) as victim:
                victim.strike(death)
            strike = Strike(kill, [death])
            phase.strikes.append(strike)
            deadline_s = time.monotonic() + BURIAL_S
            # A process that was just being started is none of them, and ends when it has booted.
            while (left := living(children) or not is_free(server.url)) and time.monotonic() < deadline_s:
                await asyncio.sleep(LOOK_S)
            load.stop()
            if not left:
                strike.recovered_ns = time.perf_counter_ns()
            else:
                phase.leaks.processes = len(living(children))
                phase.notes.append(f"{phase.leaks.processes} processes are left, or the port is not free")
                load.abandon()
        except BaseException:  # whoever ends this run waits for no answer
            load.abandon()
            raise
        finally:
            told = await load.finish()
        self._end_server()
        phase.stories = self._judge(told, phase.strikes)
        return phase

    async def _ask_calmly(self, requests: Sequence[Request], advance: Callable[[], None]) -> list[Story]:
        calm = iter([request.in_calm() for request in requests])
        load = Load(self.server.url, self._api_key, calm, self._streams, self._timeout_s)
        load.start(advance)
        stories = []
        for told in await load.finish():
            history = told.history()
            faults = [] if history.end != "done" else check(history, history)
            if history.end != "done" or faults:
                what = faults[0].detail if faults else history.told
                raise BenchError(f"request {told.request.number} ({told.request.kind}) fails without faults: {what}")
            self._calm[told.request.number] = history
            stories.append(Story(told, history, ()))
        return stories

    async def _strike(self, load: Load, kill: Kill, phase: Phase) -> Strike | None:
        """Kill, and wait until the server serves again. None if there was nothing to be killed."""
        deaths: list[Death] = []
        tasks: list[asyncio.Task[None]] = []
        deadline_s = time.monotonic() + self._bound_s
        for stage, apart_s in zip(kill.cell.stages, kill.apart_s, strict=True):
            await asyncio.sleep(apart_s)
            before = max((death.pid for death in deaths if death.stage == stage), default=0)
            victim = await self._victim(stage, before, deadline_s)
            if victim is None:
                phase.notes.append(f"no {stage} to be killed{' (the server has ended)' if self._has_ended else ''}")
                break
            deaths.append(Death(stage, kill.cell.how, victim.pid))
            tasks.append(asyncio.create_task(self._watch(victim, deaths[-1])))
            await asyncio.sleep(0)  # the watch is set
            with contextlib.suppress(ProcessLookupError):  # it died by itself just now
                victim.strike(deaths[-1])
        if not deaths:
            return None
        strike = Strike(kill, deaths)
        phase.strikes.append(strike)
        answered_ns = await self._probe_until(load, deadline_s)
        await asyncio.gather(*tasks)
        if answered_ns and len(deaths) == len(kill.cell.stages) and all(death.replaced_ns for death in deaths):
            strike.recovered_ns = answered_ns
        else:
            ended = "the server has ended" if self._has_ended else f"it does not serve {self._bound_s:g} s later"
            phase.notes.append(f"kill {len(phase.strikes)}: {ended}")
        return strike

    async def _victim(self, stage: str, before: int, deadline_s: float) -> Victim | None:
        """The living process of a stage, not `before`; None if there is none until the deadline."""
        while not self._has_ended and time.monotonic() < deadline_s:
            pid = find(self._supervisor, stage, before)
            with contextlib.suppress(OSError):
                if pid is not None:
                    return Victim(stage, pid)
            await asyncio.sleep(LOOK_S)
        return None

    async def _watch(self, victim: Victim, death: Death) -> None:
        """Note when the process was dead and collected, and when its successor was there."""
        with contextlib.closing(victim):
            await asyncio.to_thread(victim.watch, death, self._bound_s)
        deadline_s = time.monotonic() + self._bound_s
        while death.collected_ns and not self._has_ended and time.monotonic() < deadline_s:
            if find(self._supervisor, death.stage, death.pid) is not None:
                death.replaced_ns = time.perf_counter_ns()
                return
            await asyncio.sleep(LOOK_S)

    async def _probe_until(self, load: Load, deadline_s: float) -> int:
        """Ask until there is an answer; returns when its first token came, 0 if none did."""
        assert self._probe is not None
        while not self._has_ended and (left_s := deadline_s - time.monotonic()) > 0:
            told = await load.probe(self._probe, left_s)
            if told.end == "done" and told.answer.times_ns:
                return told.answer.times_ns[0]
            await asyncio.sleep(AGAIN_S)
        return 0

    async def _probe_calmly(self, load: Load, phase: Phase) -> None:
        """What those probes meet that are sent behind a kill, without one."""
        assert self._probe is not None
        while load.is_busy:
            told = await load.probe(self._probe, self._timeout_s)
            phase.probes += [(told.sent_ns, first_ns) for first_ns in told.answer.times_ns[:1]]
            await asyncio.sleep(CALM_S)

    def _judge(self, told: Sequence[Told], strikes: Sequence[Strike]) -> list[Story]:
        cuts = [
            (death.struck_ns, strike.recovered_ns or time.perf_counter_ns())
            for strike in strikes
            for death in strike.deaths
            if death.stage in CUTTERS
        ]
        stories = []
        for one in told:
            excused = any(one.ended_ns >= begin and one.sent_ns <= end for begin, end in cuts)
            history = one.history()
            faults = check(self._calm[one.request.number], history, excused=excused)
            stories.append(Story(one, history, faults))
        return stories

    async def _look_behind(self, phase: Phase, before: Holdings, restarts: Mapping[str, int], said: int) -> None:
        """After a load: what an idle server holds more than before, and whether more was started again than killed."""
        if self._has_ended or not all(strike.recovered_ns for strike in phase.strikes):
            self._end_server()
            return
        killed = [death.stage for strike in phase.strikes for death in strike.deaths]
        try:
            phase.leaks = await self._settled(before)
            after = restarts_of(self._metrics())
        except BenchError as error:
            phase.unheard = 1
            phase.notes.append(f"afterwards: {error}")
            self._end_server()
            return
        phase.extra_restarts = sum(max(0, after[stage] - restarts[stage] - killed.count(stage)) for stage in after)
        if phase.strikes:
            await asyncio.sleep(LINES_S)
        with self._log.open("rb") as log:
            log.seek(said)
            phase.lines = lines_in(log.read().decode(errors="replace"))

    async def _settled(self, before: Holdings) -> Leaks:
        """What is held more than before once nothing is done; waits a while for it to be nothing."""
        deadline_s = time.monotonic() + SETTLE_S
        while True:
            metrics = self._metrics()
            leaks = leaks_between(before, holdings_of(self._supervisor, metrics))
            if (is_idle(metrics) and is_complete(metrics) and not leaks) or time.monotonic() > deadline_s:
                return leaks
            await asyncio.sleep(AGAIN_S)

    async def _complete(self) -> dict[str, float]:
        """The metrics once all standbys are prepared; waits a while for them."""
        deadline_s = time.monotonic() + SETTLE_S
        while not is_complete(metrics := self._metrics()) and time.monotonic() < deadline_s:
            await asyncio.sleep(AGAIN_S)
        return metrics

    def _metrics(self) -> dict[str, float]:
        """Blocks, which is no harm while no load runs. Raises BenchError where there are none."""
        deadline_s = time.monotonic() + BURIAL_S
        while True:
            try:
                return samples(get(f"{self.server.url}/metrics", self._api_key).decode())
            except (OSError, ValueError) as error:
                if self._has_ended or time.monotonic() > deadline_s:
                    raise BenchError(f"no metrics at {self.server.url} ({error})") from error
            time.sleep(AGAIN_S)

    def _end_server(self) -> None:
        if self._server is not None and self._server.process is not None:
            stop(self._server.process)
        self._server = None
