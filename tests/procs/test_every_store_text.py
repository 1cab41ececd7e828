"""Frontend, tokenizer and detokenizer die behind every single store and send of a small run: clients see a pause."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from frontend import tokenizer_line
from procs import detokenizer, prompt_encoder
from tests.model_factory import TinyLlama
from tests.procs.mortal import headers_counted
from tests.procs.mortal_text import Kit, TextServer


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kit]:
    with headers_counted(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompt_encoder, "LONG_TEXT_CHARS", 30)
        for module in (tokenizer_line, detokenizer):
            patch.setattr(module, "DEATHS_MAX", 99)  # these deaths are nobody's doing
        kit = Kit(TinyLlama(layers=1).write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf"))
        yield kit
        kit.loop.close()


@pytest.fixture(scope="module")
def wanted(kit: Kit) -> list[Any]:
    return TextServer(kit).run()


def test_what_clients_are_told_in_calm(wanted: list[Any]) -> None:
    told = [one[0] if isinstance(one, tuple) else one["ev"] if isinstance(one, dict) else one for one in wanted]
    assert told == ["so it ", "a€d", 400, "tokenized", "left", "left", "detokenized", 400, "xyz", "tokenized"]
    assert [one[2] for one in wanted if isinstance(one, tuple) and len(one) == 4] == ["stop", "length", "length"]


def deaths_of(kit: Kit, stage: str) -> range:
    """Every store and send of a stage's only process."""
    server = TextServer(kit)
    server.run()
    assert len(server.deaths[stage].lives) == 1
    return range(1, server.deaths[stage].lives[0].stores + 1)


@pytest.mark.parametrize("lost", [True, False])
@pytest.mark.parametrize("stage", ["tokenizer", "detokenizer"])
def test_a_death_behind_any_store_or_send(kit: Kit, wanted: list[Any], stage: str, lost: bool) -> None:
    for at in deaths_of(kit, stage):
        server = TextServer(kit, {stage: (at,)}, lost)
        assert server.run(wanted) == wanted, at
        assert len(server.deaths[stage].lives) == 2


@pytest.mark.parametrize("lost", [True, False])
def test_a_frontend_s_death_behind_any_store_or_send(kit: Kit, wanted: list[Any], lost: bool) -> None:
    """Whoever was connected is cut off; whoever comes later is told the same, and every row is free in the end."""
    cut = 0
    for at in deaths_of(kit, "frontend"):
        server = TextServer(kit, {"frontend": (at,)}, lost)
        found = server.run(wanted)
        assert all(one in (right, "cut") for one, right in zip(found, wanted, strict=True)), at
        cut += found.count("cut")
        assert len(server.deaths["frontend"].lives) == 2
        if at % 8 == 0:
            assert server.run() == wanted, at
    assert cut
