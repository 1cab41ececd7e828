"""The adversary keeps CUDA's rules, and runs everything that they leave open."""

from collections.abc import Callable
from math import comb
from typing import Any

import numpy as np
import pytest

from gpu.device.adversary import AdversaryDevice
from gpu.device.enumeration import all_orders, bytes_of, wrong_orders
from gpu.device.host import HostDevice
from gpu.device.policies import CALLS, Eager, Lazy, Policy, Seeded, Starving, policies
from gpu.device.protocol import DeviceError

STREAMS = ("a", "b", "c")
NOTHING: dict[str, Any] = {"reads": (), "writes": ()}


class Trace:
    """A device with three streams whose operations note that they ran."""

    def __init__(self, policy: Policy | None = None, **options: Any) -> None:
        self.device = AdversaryDevice(policy, **options)
        self.a, self.b, self.c = (self.device.stream(name) for name in STREAMS)
        self.seen: list[str] = []

    def put(self, stream: Any, *names: str) -> None:
        for name in names:
            self.device.launch(stream, lambda name=name: self.seen.append(name), name=name, **NOTHING)

    def call(self, stream: Any, name: str) -> Any:
        return self.device.call(stream, lambda: self.seen.append(name), name=name, **NOTHING)

    def orders(self) -> set[str]:
        """Every order of what is queued. Counts the states by the trace itself, so that each order is seen."""
        record = self.device.buffer((16,), np.uint8, "trace")
        calls = [call.operation.run for call in self.device.queues.calls]
        found: set[str] = set()

        def noted(run: Callable[[], None]) -> Callable[[], None]:
            def wrapped() -> None:
                self.seen.clear()
                run()
                record.array[record.array.argmin()] = ord(self.seen[0])

            return wrapped

        queues = self.device.queues
        for track in queues.tracks:
            track.items[:] = [
                item._replace(run=noted(item.run)) if hasattr(item, "run") else item for item in track.items
            ]
        queues.calls[:] = [
            call._replace(operation=call.operation._replace(run=noted(run)))
            for call, run in zip(queues.calls, calls, strict=True)
        ]
        count = all_orders(self.device, lambda: bool(found.add(bytes(record.array).decode().rstrip("\0"))) or True)
        assert count.total == len(found), "each order leads to a trace of its own"
        return found


def test_streams_are_fifo_and_otherwise_free() -> None:
    t = Trace()
    t.put(t.a, "1", "2")
    t.put(t.b, "x", "y", "z")
    orders = t.orders()
    assert len(orders) == comb(5, 2)
    assert all(o.index("1") < o.index("2") and o.index("x") < o.index("y") < o.index("z") for o in orders)


def test_a_wait_holds_back_what_comes_behind_it_and_nothing_else() -> None:
    t = Trace()
    e = t.device.event("e")
    t.put(t.a, "1")
    e.record(t.a)
    t.put(t.a, "2")
    t.put(t.b, "x")
    e.wait(t.b)
    t.put(t.b, "y")
    assert t.orders() == {"1x2y", "1xy2", "12xy", "x12y", "x1y2"}


@pytest.mark.unordered
def test_a_wait_is_for_the_latest_record_issued_before_it() -> None:
    t = Trace()
    e = t.device.event("e")
    e.wait(t.b)  # never recorded: holds nothing
    t.put(t.b, "x")
    e.record(t.a)
    e.wait(t.b)
    t.put(t.a, "1")
    e.record(t.a)  # later than the wait, which is not for it
    t.put(t.b, "y")
    assert t.orders() == {"1xy", "x1y", "xy1"}


def test_waits_carry_order_through_a_stream_without_operations() -> None:
    t = Trace()
    e, f = t.device.event("e"), t.device.event("f")
    t.put(t.a, "1")
    e.record(t.a)
    e.wait(t.b)
    f.record(t.b)
    f.wait(t.c)
    t.put(t.c, "z")
    assert t.orders() == {"1z"}


def test_a_host_function_runs_any_time_later_and_in_the_order_of_the_calls() -> None:
    t = Trace()
    t.put(t.a, "1")
    t.call(t.a, "f")
    t.put(t.a, "2")
    t.call(t.b, "g")  # behind f, though its own stream has nothing to do
    assert t.orders() == {"1f2g", "1fg2", "12fg"}


def test_an_event_behind_a_host_function_does_not_wait_for_it() -> None:
    t = Trace()
    e = t.device.event("e")
    t.call(t.a, "f")
    e.record(t.a)
    e.wait(t.b)
    t.put(t.b, "x")
    assert t.orders() == {"fx", "xf"}


def test_a_graph_records_and_awaits_at_each_launch() -> None:
    t = Trace()
    ready, inside = t.device.event("ready"), t.device.event("inside")
    with t.device.capture(t.a) as graph:
        t.put(t.a, "1")
        ready.wait(t.a)
        t.put(t.a, "2")
        inside.record(t.a)
        t.put(t.a, "3")
    inside.wait(t.b)  # nothing was recorded yet: a capture records nothing
    t.put(t.b, "x")
    ready.record(t.b)
    graph.launch(t.a)
    inside.wait(t.b)
    t.put(t.b, "y")
    orders = t.orders()
    assert orders == {"1x23y", "1x2y3", "x123y", "x12y3"}


def test_a_graph_may_be_launched_again_and_cannot_hold_what_needs_the_host() -> None:
    t = Trace()
    with t.device.capture(t.a) as graph:
        t.put(t.a, "1")
        for forbidden in (
            lambda: t.call(t.a, "f"),
            lambda: graph.launch(t.a),
            lambda: t.device.timestamp("t").record(t.a),
            t.a.synchronize,
            lambda: t.device.capture(t.a).__enter__(),
        ):
            with pytest.raises(DeviceError):
                forbidden()
    graph.launch(t.a)
    graph.launch(t.a)
    t.device.synchronize()
    assert t.seen == ["1", "1"]


# ---------------------------------------------------------------------- policies


def test_an_eager_device_never_lags_and_a_lazy_one_always_does() -> None:
    eager, lazy = Trace(Eager()), Trace(Lazy())
    for t in (eager, lazy):
        t.put(t.a, "1")
        t.call(t.a, "f")
    assert (eager.seen, lazy.seen) == (["1", "f"], [])
    lazy.device.synchronize()
    assert lazy.seen == ["1", "f"]


def test_a_lazy_device_runs_only_what_the_host_waits_for() -> None:
    t = Trace(Lazy())
    e, f = t.device.event("e"), t.device.event("f")
    t.put(t.c, "z")
    t.put(t.a, "1")
    e.record(t.a)
    t.put(t.a, "2")
    e.wait(t.b)
    t.put(t.b, "x")
    f.record(t.b)
    t.put(t.b, "y")
    f.synchronize()
    assert t.seen == ["1", "x"]
    t.b.synchronize()
    assert t.seen == ["1", "x", "y"]


def test_synchronizing_a_stream_includes_its_host_functions() -> None:
    t = Trace(Lazy())
    t.put(t.b, "x")
    first = t.call(t.b, "f")
    t.call(t.a, "g")
    t.call(t.c, "h")
    t.a.synchronize()
    assert t.seen == ["x", "f", "g"]  # calls run in order, so what g stands behind had to run as well
    assert first.query()


def test_one_stream_can_be_starved_or_rushed() -> None:
    for policy, expected in ((Starving("a"), "xyz12"), (Lazy("a"), "12xyz"), (Lazy("b"), "xyz12")):
        t = Trace(policy)
        t.put(t.a, "1", "2")
        t.put(t.b, "x", "y", "z")
        t.device.synchronize()
        assert "".join(t.seen) == expected, policy.name


def test_chance_is_the_same_for_a_seed_and_finds_every_order() -> None:
    def run(seed: int) -> str:
        t = Trace(Seeded(seed))
        t.put(t.a, "1", "2")
        t.put(t.b, "x", "y")
        t.call(t.a, "f")
        t.device.synchronize()
        return "".join(t.seen)

    found = {run(seed) for seed in range(400)}
    assert found == {run(seed) for seed in range(400)}
    assert len(found) == comb(5, 2)  # f runs behind 2, so it is one more of the first stream


def test_the_host_sees_what_has_run_when_chance_lets_it() -> None:
    """Host issue and device progress interleave: between two launches, nothing or all may have run."""
    lengths = set()
    for seed in range(60):
        t = Trace(Seeded(seed))
        t.put(t.a, "1", "2")
        lengths.add(len(t.seen))
    assert lengths == {0, 1, 2}


@pytest.mark.parametrize("policy", [Lazy(), Starving("a"), Starving(CALLS), Seeded(3)])
def test_who_asks_again_and_again_gets_there(policy: Policy) -> None:
    t = Trace(policy)
    e = t.device.event("e")
    assert e.query()
    t.put(t.a, "1", "2")
    e.record(t.a)
    done = t.call(t.a, "f")
    asked = 0
    while not (e.query() and done.query()):
        asked += 1
        assert asked < 10
    assert t.seen == ["1", "2", "f"]


def test_the_policies_worth_trying_are_named_apart() -> None:
    names = [policy.name for policy in policies(STREAMS, seeds=5)]
    assert len(set(names)) == len(names) == 2 + 2 * (len(STREAMS) + 1) + 5


# ---------------------------------------------------------------------- errors


def test_an_error_sticks_and_what_is_queued_behind_it_is_skipped() -> None:
    t = Trace(Lazy())
    e = t.device.event("e")
    t.device.launch(t.a, lambda: 1 / 0, name="divide", **NOTHING)  # type: ignore[arg-type, return-value]
    t.put(t.a, "1")
    e.record(t.a)
    e.wait(t.b)
    t.put(t.b, "x")
    with pytest.raises(DeviceError, match="divide on stream a: ZeroDivisionError") as caught:
        t.device.synchronize()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert t.seen == []
    for call in (t.device.check, lambda: t.put(t.a, "2"), t.a.synchronize, lambda: e.record(t.a), e.query):
        with pytest.raises(DeviceError, match="divide"):
            call()
    t.device.close()
    t.device.close()
    with pytest.raises(DeviceError, match="closed"):
        t.device.check()


def test_an_operation_cannot_call_the_device() -> None:
    t = Trace(Eager())
    with pytest.raises(DeviceError, match="an operation calls the device"):
        t.device.launch(t.a, lambda: t.put(t.b, "x"), name="nested", **NOTHING)
        t.device.check()


def test_streams_of_another_device_or_with_a_known_name_are_refused() -> None:
    t = Trace()
    with pytest.raises(AssertionError):
        t.put(AdversaryDevice().stream("a"), "1")
    with pytest.raises(AssertionError):
        t.device.stream("a")


# ---------------------------------------------------------------------- memory and times


def test_memory_is_numpy_or_torch_and_pinned_memory_is_the_callers() -> None:
    import torch

    host = np.arange(4, dtype=np.int32)
    for memory, kind in (("numpy", np.ndarray), ("torch", torch.Tensor)):
        device = AdversaryDevice(memory=memory)  # type: ignore[arg-type]
        buffer, seeds = device.buffer((2, 3), np.float32, "b"), device.buffer((2,), np.uint64, "seeds")
        pinned = device.pinned(host, "pinned")
        assert isinstance(buffer.array, kind) and tuple(buffer.array.shape) == (2, 3)
        assert isinstance(pinned.array, kind)
        pinned.array[1] = 70
        assert host[1] == 70
        assert (buffer.nbytes, seeds.nbytes, pinned.rows(1, 3)[1:]) == (24, 16, (4, 12))
        assert str(seeds.array.dtype).removeprefix("torch.") == ("uint64" if memory == "numpy" else "int64")
        bytes_of(buffer)[:] = 255
        assert np.isnan(np.asarray(buffer.array)).all()


def test_times_grow_along_a_stream_whatever_the_order() -> None:
    for policy in policies(STREAMS, seeds=10):
        t = Trace(policy)
        begin, end = t.device.timestamp("begin"), t.device.timestamp("end")
        begin.record(t.a)
        t.put(t.a, "1")
        end.record(t.a)
        t.put(t.b, "x")
        times: list[int] = []
        t.device.call(t.a, lambda times=times, b=begin, e=end: times.extend((b.ns(), e.ns())), name="times", **NOTHING)
        t.device.synchronize()
        assert times == [1000, 3000]


# ---------------------------------------------------------------------- enumeration


def racy(device: AdversaryDevice, ordered: bool) -> Any:
    """Two writers of one cell, with or without an order between them."""
    cell = device.buffer((1,), np.int64, "cell")
    a, b, e = device.stream("a"), device.stream("b"), device.event("e")

    def add() -> None:
        cell.array[0] += 1

    def double() -> None:
        cell.array[0] *= 2

    for _ in range(2):
        device.launch(a, add, reads=(cell.region(),), writes=(cell.region(),), name="add")
    e.record(a)
    if ordered:
        e.wait(b)
    device.launch(b, double, reads=(cell.region(),), writes=(cell.region(),), name="double")
    return cell


@pytest.mark.unordered
@pytest.mark.parametrize(("ordered", "total", "wrong"), [(True, 1, 0), (False, 3, 2)])
def test_every_order_is_counted_and_judged(ordered: bool, total: int, wrong: int) -> None:
    device = AdversaryDevice()
    cell = racy(device, ordered)
    found = all_orders(device, lambda: cell.array[0] == 4)
    assert (found.total, found.wrong) == (total, wrong)
    assert cell.array[0] == 0, "memory is as it was"
    device.synchronize()
    assert cell.array[0] in (2, 3, 4)

    def run(device: AdversaryDevice) -> int:
        cell = racy(device, ordered)
        device.synchronize()
        return int(cell.array[0])

    assert bool(wrong_orders(run, 4, policies(("a", "b"), seeds=5))) == bool(wrong)


def test_orders_that_lead_to_the_same_state_are_walked_once_and_counted_each() -> None:
    device = AdversaryDevice()
    streams = [device.stream(f"s{i}") for i in range(4)]
    for stream in streams:
        for _ in range(5):
            device.launch(stream, lambda: None, name="op", **NOTHING)
    found = all_orders(device, lambda: True)
    assert found.states == 6**4
    assert found.total == comb(20, 5) * comb(15, 5) * comb(10, 5)
    with pytest.raises(AssertionError, match="too many states"):
        all_orders(device, lambda: True, states_max=100)


@pytest.mark.unordered
def test_an_error_of_the_device_makes_the_orders_that_reach_it_wrong() -> None:
    device = AdversaryDevice()
    a, b = device.stream("a"), device.stream("b")
    cell = device.buffer((1,), np.int64, "cell")

    def write() -> None:
        cell.array[0] = 1

    def need() -> None:
        assert cell.array[0] == 1, "read too early"

    device.launch(a, write, reads=(), writes=(cell.region(),), name="write")
    device.launch(b, need, reads=(cell.region(),), writes=(), name="need")
    device.launch(b, lambda: None, name="behind", **NOTHING)
    found = all_orders(device, lambda: True)
    assert (found.total, found.wrong) == (3, 2)
    device.check()


# ---------------------------------------------------------------------- the observer


class Log:
    def __init__(self) -> None:
        self.heard: list[tuple[str, ...]] = []

    def __getattr__(self, kind: str) -> Callable[..., None]:
        def hear(*args: Any) -> None:
            self.heard.append((kind, *(str(getattr(arg, "name", type(arg).__name__)) for arg in args)))

        return hear


def test_an_observer_hears_the_same_as_from_the_host_device() -> None:
    heard = []
    for make in (HostDevice, lambda observer: AdversaryDevice(Eager(), observer=observer)):
        log = Log()
        device: Any = make(observer=log)
        a, b, e = device.stream("a"), device.stream("b"), device.event("e")
        with device.capture(a) as graph:
            device.launch(a, lambda: None, name="op", **NOTHING)
            e.record(a)
        e.wait(b)
        graph.launch(a)
        e.wait(b)
        device.timestamp("t").record(b)
        done = device.call(b, lambda: None, name="f", **NOTHING)
        device.host_access(name="touch", **NOTHING)
        device.synchronize()
        assert done.query()
        assert e.query()
        e.synchronize()
        b.synchronize()
        device.close()
        heard.append([tuple(part.replace("Host", "").replace("Adversary", "") for part in line) for line in log.heard])
    assert heard[0] == heard[1]
    assert len(heard[0]) > 12
