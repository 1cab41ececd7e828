"""Any workload, any timing: every request ends with exactly the tokens that it would get alone, and no page is lost."""

from hypothesis import given, settings
from hypothesis import strategies as st

from shm.config import ServerConfig
from tests.procs.simulated_device import tiny_config
from tests.procs.simulated_server import Request, SimulatedServer


@st.composite
def configs(draw: st.DrawFn) -> ServerConfig:
    window = draw(st.sampled_from([1, 1, 2, 4]))
    page_size = draw(st.sampled_from([1, 2, 4]))
    max_len = draw(st.integers(4, 28))
    row_pages = -(-(max_len + 2 * window) // page_size)
    return tiny_config(
        max_running=draw(st.integers(1, 5)),
        max_queued=draw(st.integers(0, 6)),
        page_size=page_size,
        max_len=max_len,
        kv_tokens=draw(st.integers(row_pages, 3 * row_pages)) * page_size,
        prefill_chunk=draw(st.sampled_from([1, 3, 8, 64])),
        window=window,
        overlap=draw(st.booleans()),
    )


@st.composite
def requests(draw: st.DrawFn, max_len: int) -> Request:
    length = draw(st.integers(1, max_len - 1))
    # A few families of prompts, so that prefixes are shared; the last tokens often differ.
    prompt = [draw(st.integers(0, 1))] * length
    for at in draw(st.lists(st.integers(0, length - 1), max_size=2)):
        prompt[at] = 2
    return Request(
        prompt=prompt,
        max_new=draw(st.integers(1, max_len - length + 3)),
        arrival=draw(st.integers(0, 25)),
        seed=draw(st.integers(0, 2)),
        stop_ids=tuple(draw(st.lists(st.integers(0, 39), max_size=2))),
        ignore_eos=draw(st.booleans()),
        abort_after=draw(st.none() | st.none() | st.integers(0, 20)),
        text_stop=draw(st.none() | st.none() | st.integers(1, 12)),
    )


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_every_request_gets_its_own_tokens(data: st.DataObject) -> None:
    config = data.draw(configs())
    workload = data.draw(st.lists(requests(config.max_len), min_size=1, max_size=12))
    lazy = data.draw(st.text("01", min_size=1, max_size=5))
    SimulatedServer(config, workload, lazy).run()
