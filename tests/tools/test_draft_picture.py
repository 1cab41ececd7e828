"""The picture of what drafts brought says what the benchmark's figures say."""

import json
from dataclasses import asdict
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tools.bench_figures import Figures
from tools.draft_picture import LEFT, UNIT, main, short

SVG = "{http://www.w3.org/2000/svg}"


def one(level: int, ratio: float, windows: tuple[float, ...] = ()) -> Figures:
    return Figures(level, 8, 0, 1, 1, 100 * ratio, 1, 1, 1, 1, 5.0, 0.001, 0.01, 20.0, windows, ratio)


def test_bars_are_as_long_as_windows_and_ratios_are_to_the_first(tmp_path: Path) -> None:
    servers = {
        "stepahead --speculate off": [one(1, 1.0), one(8, 1.0)],
        "stepahead --speculate mtp --draft-tokens 3": [one(1, 1.5, (5, 3, 1, 1)), one(8, 1.0)],
        "stepahead --speculate <other>": [one(1, 1.2), one(8, 0.9, (1, 1))],
    }
    document = {"medians": {name: [asdict(level) for level in levels] for name, levels in servers.items()}}
    (tmp_path / "figures.json").write_text(json.dumps(document))
    main([str(tmp_path / "figures.json"), str(tmp_path / "drafts.svg")])
    drawn = ElementTree.parse(tmp_path / "drafts.svg").getroot()
    texts = [text.text for text in drawn.iter(f"{SVG}text")]
    assert "tokens/s at 1, 8 at once" in texts and "off" not in texts
    assert texts[2:] == ["mtp", "1", "50%", "1.80", "1.50x, 1.00x", "<other>", "1", "50%", "1.50", "1.20x, 0.90x"]
    bars = [(float(bar.attrib["x"]), float(bar.attrib["width"])) for bar in drawn.iter(f"{SVG}rect")]
    ends = [x + width for x, width in bars]
    assert (ends[3] - LEFT) / UNIT == pytest.approx(1.8, abs=0.01), "mtp's window, four bars"
    assert (ends[5] - LEFT) / UNIT == pytest.approx(1.5, abs=0.01)
    assert all(ends[i] == pytest.approx(bars[i + 1][0], abs=0.2) for i in (0, 1, 2, 4))


def test_a_server_is_called_by_what_drafts() -> None:
    assert short("stepahead --speculate ngram --ngram-shared") == "ngram"
    assert short("vllm") == "vllm"
