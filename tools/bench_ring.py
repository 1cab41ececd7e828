"""What a message costs between two processes, on our ring and on other wires: `stepahead bench ring`.

Two real processes, the same numbers over each wire: the ring with its doorbells, ZeroMQ with raw bytes and with JSON,
and multiprocessing's Pipe. Says the time of a round trip and how many messages a second go one way, each wire in turn
within every repeat, as ratios to the ring's. Every message is checked at both ends. Nothing is pickled.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict

import numpy as np
import orjson

from tools.bench_figures import percentile
from tools.bench_outputs import about_of, add_files, put_out, shown_progress
from tools.bench_serve import BenchError, interrupt_on_sigterm
from tools.bench_watch import core_wait_ns_of
from tools.ring_figures import PLACES, Row, Run, rows_of, table_text, verdicts
from tools.ring_peer import END, number_of
from tools.ring_picture import picture
from tools.ring_wires import NAMES, SLOTS, Numbers, Wire, WireError, make

NUMBER_MOST = 150_000  # as token ids are
WARM_SHARE = 0.1  # of a run's round trips, that do not count
LOOK_EVERY = 32  # messages, at the clock


class Peer:
    """A wire to another process, and that process."""

    def __init__(self, wire: Wire, process: subprocess.Popen[str]) -> None:
        self.wire = wire
        self._process = process

    def core_wait_s(self) -> float:
        """For how long the threads of both processes could have run and had no core, so far."""
        return (core_wait_ns_of(os.getpid()) + core_wait_ns_of(self._process.pid)) / 1e9

    def begin(self, job: str) -> None:
        """Have it do a job of `ring_peer.JOBS`. Raises BenchError if it is gone."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{job}\n")
        self._process.stdin.flush()
        self._line()

    def cpu_s(self, sent: int) -> float:
        """The processor time of the job that is over. Raises BenchError unless it saw `sent` messages."""
        told = orjson.loads(self._line())
        if told["messages"] != sent:
            raise BenchError(f"{sent} messages were sent, {told['messages']} came")
        return float(told["cpu_s"])

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise BenchError(f"the other process ended with status {self._process.wait()}")
        return line


@contextmanager
def peer_of(kind: str, size: int, core: int | None, slots: int = SLOTS) -> Iterator[Peer]:
    """A wire with another process at its other end, on that core. The process is ended behind it."""
    ends = make(kind, size // 4, slots)
    command = [sys.executable, "-m", "tools.ring_peer", orjson.dumps(ends.there).decode()]
    before = os.sched_getaffinity(0)
    try:
        if core is not None:
            os.sched_setaffinity(0, {core})  # the process inherits it, with all threads that it will have
        piped = subprocess.PIPE
        process = subprocess.Popen(command, text=True, pass_fds=ends.fds, stdin=piped, stdout=piped)
    finally:
        os.sched_setaffinity(0, before)
    try:
        if kind == "pipe":
            os.close(ends.fds[0])  # so that its end is noticed
        yield Peer(ends.here, process)
    finally:
        process.kill()
        process.communicate()
        ends.here.close()


def round_trips(peer: Peer, numbers: Numbers, seconds: float) -> tuple[list[float], float]:
    """Send a message and wait for it to come back, for so long. Returns all times in us, and the CPU time of one."""
    wire, last, times = peer.wire, int(numbers[-1]), list[float]()
    peer.begin("echo")
    began_s, end_ns = time.process_time(), time.perf_counter_ns() + int(seconds * 1e9)
    while (sent_ns := time.perf_counter_ns()) < end_ns or not times:
        numbers[0] = len(times)
        wire.send(numbers)
        back = wire.receive()
        if number_of(back, len(times)) == END or back[-1] != last:
            raise WireError("another message came back than was sent")
        times.append((time.perf_counter_ns() - sent_ns) / 1e3)
    cpu_s = time.process_time() - began_s
    numbers[0] = END
    wire.send(numbers)
    return times, (cpu_s + peer.cpu_s(len(times))) * 1e6 / len(times)


def one_way(peer: Peer, numbers: Numbers, seconds: float) -> tuple[float, float]:
    """Send messages for so long, until all are taken. Returns messages a second, and the CPU time of one in us."""
    wire, sent = peer.wire, 0
    peer.begin("take")
    began_s, began_ns = time.process_time(), time.perf_counter_ns()
    end_ns = began_ns + int(seconds * 1e9)
    while time.perf_counter_ns() < end_ns:
        for _ in range(LOOK_EVERY):
            numbers[0] = sent
            wire.send(numbers)
            sent += 1
    numbers[0] = END
    wire.send(numbers)
    number_of(wire.receive(), sent)
    took_s, cpu_s = (time.perf_counter_ns() - began_ns) / 1e9, time.process_time() - began_s
    return sent / took_s, (cpu_s + peer.cpu_s(sent)) * 1e6 / sent


def one_run(peer: Peer, numbers: Numbers, seconds: float) -> Run:
    """Both measurements of one wire, half of the time for each."""
    waited_s, began_s = peer.core_wait_s(), time.monotonic()
    times, trip_cpu_us = round_trips(peer, numbers, seconds / 2)
    warm = times[int(WARM_SHARE * len(times)) :]
    rate, cpu_us = one_way(peer, numbers, seconds / 2)
    core_wait = (peer.core_wait_s() - waited_s) / (time.monotonic() - began_s)
    return Run(percentile(warm, 50), percentile(warm, 99), trip_cpu_us, rate, cpu_us, core_wait)


def cores_of(place: str) -> tuple[int | None, int | None]:
    """The cores of this process and of the other one; None for any. Raises BenchError where there are too few."""
    cores = sorted(os.sched_getaffinity(0))
    if place == "split" and len(cores) < 2:
        raise BenchError("--cores split: there is one core only")
    return {"any": (None, None), "one": (cores[0], cores[0]), "split": (cores[0], cores[-1])}[place]


@contextmanager
def on_core(core: int | None) -> Iterator[None]:
    """Stay on that core meanwhile, and threads that begin with it."""
    before = os.sched_getaffinity(0)
    if core is not None:
        os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def measure(options: argparse.Namespace) -> list[Row]:
    """All places and wires, in turn within every repeat. Raises BenchError."""
    numbers = np.random.default_rng(0).integers(0, NUMBER_MOST, options.size // 4, np.int32)
    total = options.repeat * len(options.cores) * len(NAMES)
    with shown_progress() as progress, ExitStack() as stack:
        bar = progress.add_task("starting", total=total)
        peers: dict[tuple[str, str], Peer] = {}
        places = {place: cores_of(place) for place in options.cores}
        for place, (ours, theirs) in places.items():
            with on_core(ours):
                for wire in NAMES:
                    peers[place, wire] = stack.enter_context(peer_of(wire, options.size, theirs, options.slots))
        for (place, _), peer in peers.items():  # discarded: the first messages of each process
            with on_core(places[place][0]):
                one_run(peer, numbers, 0.1)
        runs: dict[tuple[str, str], list[Run]] = {key: [] for key in peers}
        for repeat in range(options.repeat):
            order = list(peers)
            turn = repeat % len(order)  # nobody is always the first, or behind the same one
            for place, wire in order[turn:] + order[:turn]:
                progress.update(bar, description=f"{NAMES[wire]}, {PLACES[place]}")
                with on_core(places[place][0]):
                    runs[place, wire].append(one_run(peers[place, wire], numbers, options.seconds))
                progress.advance(bar)
    return rows_of(runs)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line. argparse ends the process with status 2 for what it does not understand."""
    parser = argparse.ArgumentParser("bench ring", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--size", type=_size, default=1024, metavar="BYTES", help="of a message, a multiple of 4")
    told = "messages under way: of the ring, and of each of ZeroMQ's queues"
    parser.add_argument("--slots", type=_slots, default=SLOTS, metavar="N", help=told)
    parser.add_argument("--seconds", type=float, default=1.0, help="of one wire in one repeat")
    parser.add_argument("--repeat", type=int, default=5, help="runs of each wire; the medians are printed")
    told = "where the two processes run: split (a core each), one (the same core), any (wherever they are put)"
    parser.add_argument("--cores", type=_places, default=["split", "one"], metavar="PLACE,...", help=told)
    parser.add_argument("--gate", action="store_true", help="status 1 unless the gates of the design are reached")
    add_files(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints, writes. Returns 0; 1 if a wire failed or (--gate) is too slow; 130 if it was interrupted."""
    options = parse(argv)
    interrupt_on_sigterm()
    try:
        rows = measure(options)
    except (BenchError, WireError) as error:
        print(f"bench ring: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # of the terminal, or SIGTERM: the processes that were started have ended by now
        return 130
    judged = verdicts(rows, options.size)
    document: dict[str, object] = {
        "about": about_of(options),
        "rows": [asdict(row) for row in rows],
        "gates": [asdict(gate) | {"least": gate.least, "ratio": ratio} for gate, ratio, _ in judged],
    }
    put_out(options, document, table_text(rows, options.size, options.slots, options.repeat), lambda: picture(rows))
    return int(options.gate and not (judged and all(good for _, _, good in judged)))


def _size(text: str) -> int:
    size = int(text)
    if size < 8 or size % 4:
        raise argparse.ArgumentTypeError("must be a multiple of 4, and at least 8")
    return size


def _slots(text: str) -> int:
    slots = int(text)
    if slots < 4:
        raise argparse.ArgumentTypeError("must be at least 4")
    return slots


def _places(text: str) -> list[str]:
    places = list(dict.fromkeys(text.split(",")))
    if unknown := set(places) - set(PLACES):
        raise argparse.ArgumentTypeError(f"{min(unknown)} is none of {', '.join(PLACES)}")
    return places


if __name__ == "__main__":
    sys.exit(main())
