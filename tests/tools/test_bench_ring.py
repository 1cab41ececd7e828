"""The ring's benchmark: every wire carries what was sent, faults are found, figures, gates and picture are right."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import orjson
import pytest

from tests.e2e.live_server import descendants
from tools import bench_ring, ring_wires
from tools.bench_ring import Peer, main, one_way, parse, peer_of, round_trips
from tools.bench_serve import BenchError
from tools.ring_figures import GATES, Row, Run, rows_of, table_text, verdicts
from tools.ring_peer import END, echo, number_of, take
from tools.ring_picture import LEFT, PANEL, SCALE_MOST, picture
from tools.ring_wires import NAMES, SLOTS, Wire, WireError, make, open_end


@contextmanager
def both(kind: str, numbers: int = 4, slots: int = SLOTS) -> Iterator[tuple[Wire, Wire]]:
    """Both ends of a wire, in one process; the ring's share its descriptors."""
    ends = make(kind, numbers, slots)
    other = open_end(ends.there)
    try:
        yield ends.here, other
    finally:
        ends.here.close()
        if kind != "ring":
            other.close()


@pytest.mark.parametrize("kind", NAMES)
def test_each_wire_carries_numbers_both_ways_and_in_order(kind: str) -> None:
    with both(kind) as (here, there):
        for base in (0, 10):
            for number in range(3):
                here.send(np.array([base + number, -5, 2**31 - 1, 0], np.int32))
            got = [[int(one) for one in there.receive()] for _ in range(3)]
            assert got == [[base + number, -5, 2**31 - 1, 0] for number in range(3)]
        there.send(there_sent := np.array([7, 8, 9, 10], np.int32))
        assert list(here.receive()) == there_sent.tolist()


@pytest.mark.parametrize(("kind", "most"), [("ring", 8), ("zmq", 300)])
def test_a_wire_holds_so_many_messages_and_no_more(kind: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """ZeroMQ's queues and the socket between them; messages are large, so that the socket holds few."""
    monkeypatch.setattr(ring_wires, "WAIT_SECONDS_MAX", 0.1)
    with both(kind, 16_384, 8) as (here, there):
        count = 0
        with pytest.raises(WireError, match="does not answer"):
            for count in range(1000):
                here.send(np.full(16_384, count, np.int32))
        assert 8 <= count <= most
        assert [int(there.receive()[-1]) for _ in range(8)] == list(range(8))


@pytest.mark.parametrize("kind", NAMES)
def test_more_than_fits_waits_for_the_reader(kind: str) -> None:
    count = 5 * SLOTS + 3
    with both(kind) as (here, there):
        taker = threading.Thread(target=take, args=(there,))
        taker.start()
        for number in (*range(count), END):
            here.send(np.array([number, 1, 2, 3], np.int32))
        assert here.receive()[0] == count
        taker.join(10)


@pytest.mark.parametrize("kind", ["ring", "zmq", "json"])
def test_an_end_that_says_nothing_is_an_error(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_wires, "WAIT_SECONDS_MAX", 0.05)
    with both(kind) as (here, _), pytest.raises(WireError, match="does not answer"):
        here.receive()


def test_so_is_a_pipe_that_is_closed_and_a_ring_that_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_wires, "WAIT_SECONDS_MAX", 0.05)
    with both("pipe") as (here, there):
        there.close()
        with pytest.raises(WireError, match="gone"):
            here.receive()
    with both("ring") as (here, _), pytest.raises(WireError, match="does not answer"):
        for number in range(SLOTS + 1):
            here.send([number, 0, 0, 0])


class Scripted:
    """A wire on which these messages come in."""

    def __init__(self, *numbers: int) -> None:
        self._numbers = iter(numbers)
        self.sent: list[int] = []

    def send(self, message: ring_wires.Message) -> None:
        self.sent.append(int(message[0]))

    def receive(self) -> ring_wires.Message:
        return [next(self._numbers), 9]

    def close(self) -> None:
        pass


@pytest.mark.parametrize("job", [echo, take])
def test_the_peer_finds_messages_that_are_lost_or_doubled(job: object) -> None:
    assert callable(job)
    assert job(Scripted(0, 1, 2, END)) == 3
    for numbers in ((0, 2, END), (0, 0, END), (1, END)):
        with pytest.raises(WireError, match="due"):
            job(Scripted(*numbers))


def test_what_comes_back_has_to_be_what_was_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Peer, "begin", lambda *_: None)
    monkeypatch.setattr(Peer, "cpu_s", lambda *_: 0.0)
    numbers = np.array([0, 9], np.int32)
    wire = Scripted(0)
    times, _ = round_trips(Peer(wire, None), numbers, 0.0)  # type: ignore[arg-type]
    assert len(times) == 1 and wire.sent == [0, END]
    for bad, last in ((Scripted(1), 9), (Scripted(END), 9), (Scripted(0), 8)):
        with pytest.raises(WireError):
            round_trips(Peer(bad, None), np.array([0, last], np.int32), 0.0)  # type: ignore[arg-type]
    with pytest.raises(WireError, match="due"):
        one_way(Peer(Scripted(31), None), numbers, 0.001)  # type: ignore[arg-type]
    assert number_of([END, 0], 5) == END


def test_the_peers_count_is_compared_and_its_end_noticed() -> None:
    numbers = np.array([0, 1, 2, 3], np.int32)
    with peer_of("pipe", 16, None) as peer:
        peer.begin("take")
        peer.wire.send([END, 0, 0, 0])
        assert peer.wire.receive()[0] == 0
        with pytest.raises(BenchError, match="1 messages were sent, 0 came"):
            peer.cpu_s(1)
        rate, cpu_us = one_way(peer, numbers, 0.01)
        assert rate > 0 and cpu_us > 0
        peer._process.kill()
        with pytest.raises((BenchError, OSError)):
            peer.begin("echo")
            peer.begin("echo")


def run(trip_us: float, rate: float) -> Run:
    return Run(trip_us, 2 * trip_us, trip_us / 2, rate, 1.0, 0.25)


def rows(zmq_us: float = 148, zmq_rate: float = 171e3) -> list[Row]:
    """A ring as fast as the prototype was, in a repeat in which the machine is fast and one in which it is slow."""
    runs = {
        ("split", "ring"): [run(67, 715e3), run(670, 71.5e3), run(67, 715e3)],
        ("split", "zmq"): [run(zmq_us, zmq_rate), run(10 * zmq_us, zmq_rate / 10), run(zmq_us, zmq_rate)],
    }
    return rows_of(runs)


def test_ratios_are_those_within_a_repeat() -> None:
    ring, zmq = rows()
    assert (ring.round_trip_ratio, ring.messages_ratio) == (1, 1)
    assert zmq.round_trip_ratio == pytest.approx(148 / 67) and zmq.messages_ratio == pytest.approx(715 / 171)
    assert zmq.medians == run(148, 171e3)


def test_gates_are_ratios_and_of_one_size_and_place() -> None:
    assert [gate.least for gate in GATES.values()] == [pytest.approx(148 / 67), pytest.approx(715 / 171)]
    assert [good for *_, good in verdicts(rows(148.1, 170.9e3), 1024)] == [True, True]
    assert [good for *_, good in verdicts(rows(147, 170.9e3), 1024)] == [False, True]
    assert [good for *_, good in verdicts(rows(148.1, 172e3), 1024)] == [True, False]
    assert verdicts(rows(), 4096) == []
    told = table_text(rows(147, 170e3), 1024, 64, 3)
    assert "MISSED" in told and "reached" in told and "only with --size 1024" in table_text(rows(), 4096, 64, 3)


def test_table_and_picture_show_every_row() -> None:
    lines = table_text(rows(), 1024, 64, 3).splitlines()
    assert (
        len({len(line) for line in lines[:3]}) == 1
        and lines[1].startswith("ring")
        and "2.21" in lines[2]
        and lines[2].endswith("25%")
    )
    kinds = [element.get("class") for element in ElementTree.fromstring(picture(rows())).iter()]
    assert (kinds.count("ring"), kinds.count("bar"), kinds.count("p99")) == (2, 2, 2)


def test_one_slow_moment_does_not_flatten_the_picture() -> None:
    slow = replace(rows()[0].medians, round_trip_us_p99=5000.0)
    parts = list(ElementTree.fromstring(picture([replace(rows()[0], medians=slow)])).iter())
    (line,) = (element for element in parts if element.get("class") == "p99")
    assert float(line.get("x2", "0")) == LEFT + PANEL
    bar = next(element for element in parts if element.get("class") == "ring")
    assert float(bar.get("width", "0")) == pytest.approx(PANEL / SCALE_MOST, abs=0.1)


def test_the_whole_in_small(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = set(descendants(os.getpid()))
    files = ["--json", str(tmp_path / "figures.json"), "--picture", str(tmp_path / "picture.svg")]
    arguments = ["--cores", "any,one", "--repeat", "2", "--seconds", "0.04", "--size", "64"]
    assert main([*arguments, *files]) == 0
    document = orjson.loads((tmp_path / "figures.json").read_bytes())
    assert {(row["cores"], row["wire"]) for row in document["rows"]} == {(c, w) for c in ("any", "one") for w in NAMES}
    for row in document["rows"]:
        assert row["medians"].pop("core_wait") >= 0
        assert min(row["medians"].values()) > 0 and row["messages_ratio"] > 0, row
    assert document["gates"] == [] and "gates: only with" in capsys.readouterr().out
    ElementTree.parse(tmp_path / "picture.svg")
    assert set(descendants(os.getpid())) <= before, "it ends what it started"


@pytest.mark.parametrize(("good", "status"), [(True, 0), (False, 1)])
def test_only_with_gate_do_they_count(good: bool, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = rows(*((149, 170e3) if good else (100, 170e3)))
    monkeypatch.setattr(bench_ring, "measure", lambda _: measured)
    assert main(["--gate"]) == status and main([]) == 0
    assert main(["--gate", "--size", "64"]) == 1, "nothing was judged"


def test_bad_input_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--size", "6"], ["--size", "4"], ["--slots", "3"], ["--cores", "moon"]):
        with pytest.raises(SystemExit):
            parse(arguments)
    capsys.readouterr()
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    assert main(["--cores", "split"]) == 1
    told = capsys.readouterr().err.strip()
    assert "there is one core only" in told and "\n" not in told
