"""Tables, medians, gains and the picture of the overlap benchmark, from runs that never were."""

from xml.etree import ElementTree

import numpy as np
import pytest

from shm.limits import WINDOW_MAX
from shm.stats import accepted_runs
from tests.tools.test_step_figures import steps
from tools.bench_overlap import asks_of, tokens_and_rounds
from tools.bench_run import Load
from tools.bench_serve import BenchError
from tools.bench_watch import Seen
from tools.clocked_model import PRESETS, answer
from tools.overlap_figures import Row, accept_length, document_of, gain_of, median_row, pairs_of, row_of, table_text
from tools.overlap_picture import picture
from tools.step_figures import typical


def load(tokens_per_s: float = 290.0, wrong: int = 0) -> Load:
    return Load(4, int(tokens_per_s * 4), 4.0, 0.1, wrong, 0, (), None)


def seen(gap: int = 20, windows: tuple[int, ...] = ()) -> Seen:
    runs = {accepted_runs(i): float(windows[i]) if i < len(windows) else 0.0 for i in range(WINDOW_MAX)}
    counters = {
        "gpu": {"steps_total": 300.0},
        "frontend": {"ttft_s count": 4.0, "ttft_s sum": 0.04},
        "scheduler": runs,
    }
    spans = steps(300, gap=gap, queued_before=100 if gap < 100 else -gap)
    return Seen(spans, 0, {"scheduler": 300 * 50_000, "gpu": 300 * 90_000}, {"gpu": 300 * 3_000}, counters)


def rows_of(preset: str = "qwen3-8b", at_once: int = 1) -> list[Row]:
    on = row_of(preset, at_once, True, 3400.0, load(288), seen(20))
    off = row_of(preset, at_once, False, 3400.0, load(256), seen(280))
    return [on, off]


def test_a_row_says_what_was_seen() -> None:
    on, off = rows_of()
    assert (on.cpu_us["scheduler"], on.cpu_us["gpu"], on.core_wait_us, on.ttft_ms) == (50, 90, 3, pytest.approx(10))
    assert (on.steps.starved_steps, off.steps.starved_steps) == (0, 1)
    assert pairs_of([on, off]) == [(on, off)] and gain_of(on, off) == pytest.approx(0.125)
    assert on.accept_length is None


def test_the_accept_length_is_tokens_a_window() -> None:
    assert accept_length(seen(windows=(10, 0, 0, 10))) == 2.5
    assert accept_length(seen()) is None


def test_a_run_without_steps_says_why() -> None:
    empty = seen()
    empty.spans = np.empty((0, 4), np.uint64)
    failed = Load(1, 0, 1.0, 0.0, 0, 1, (), "status 500")
    with pytest.raises(BenchError, match="status 500"):
        row_of("qwen3-8b", 1, True, 3400.0, failed, empty)


def test_medians_are_of_every_figure_and_faults_are_summed() -> None:
    runs = [row_of("glm-5.3", 8, True, 7000.0, load(speed, wrong=1), seen(gap)) for speed, gap in
            ((100.0, 10), (300.0, 30), (200.0, 20))]  # fmt: skip
    row = median_row(runs)
    assert (row.tokens_per_s, row.steps.gap_us_p50, row.wrong, row.requests) == (200, 20, 3, 12)
    assert row.cpu_us == {"gpu": 90, "scheduler": 50}


def test_tables_have_the_articles_figures_beside_ours() -> None:
    rows = [*rows_of(), *rows_of("glm-5.3-mtp", 64)]
    text = table_text(rows)
    assert "+12.5%" in text and "+4%..+5%" in text and "104/95" in text
    assert "step to step" in text and "3870" in text
    assert "CPU, launch" in text and "370" in text and "640" in text, "by parts, and in all"
    widths = {len(line) for line in text.split("\n\n")[0].splitlines()[:3]}
    assert len(widths) == 1, "columns are aligned"
    assert document_of(rows, {}, {})["gains"][0]["gain"] == pytest.approx(0.125)  # type: ignore[index]


def test_the_picture_is_well_formed_whatever_there_is_to_draw() -> None:
    rows = [*rows_of(), *rows_of("glm-5.3", 256)]
    drawn = {"qwen3-8b": {"overlap": typical(seen(20).spans), "without": typical(seen(280).spans)}}
    root = ElementTree.fromstring(picture(rows, drawn))
    kinds = [element.get("class") for element in root.iter() if element.get("class")]
    assert kinds.count("step") == 6 and kinds.count("gap") == 4 and kinds.count("gain") == 2
    assert "article" in kinds
    slower = [rows_of()[1]]
    ElementTree.fromstring(picture(slower, {}))


@pytest.mark.parametrize("preset", sorted(PRESETS))
@pytest.mark.parametrize("at_once", [1, 8, 64, 256])
def test_a_run_takes_about_as_long_as_it_is_told(preset: str, at_once: int) -> None:
    one = PRESETS[preset]
    tokens, rounds = tokens_and_rounds(one, at_once, 4.0)
    gained = sum(one.file.accept**draft for draft in range(one.drafts + 1))
    seconds = tokens * rounds / gained * one.step_us(at_once) / 1e6
    assert 16 <= tokens <= 256 and (2.0 <= seconds <= 6.0 or tokens == 16)


def test_requests_are_the_seeds_and_come_with_their_answers() -> None:
    asks = asks_of(PRESETS["qwen3-8b"], 2, 0.5, "7")
    assert asks == asks_of(PRESETS["qwen3-8b"], 2, 0.5, "7") != asks_of(PRESETS["qwen3-8b"], 2, 0.5, "8")
    assert all(ask.wanted == answer(ask.prompt, ask.count) for ask in asks)
    assert len({tuple(ask.prompt) for ask in asks}) == len(asks)
