"""Frontend, tokenizer and detokenizer die behind every single store and send of a small run: clients see a pause."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frontend import tokenizer_line
from frontend.rows import RowTable
from procs import detokenizer, prompt_encoder
from procs.detokenizer import Detokenizer
from procs.tokenizer import TokenizerStage
from tests.model_factory import TinyLlama
from tests.procs.mortal import headers_counted
from tests.procs.mortal_text import STAGES, Kit, TextServer


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


RECOVERY = 16  # stores and sends of a process, beginning with its start: what it takes over is behind it then


@pytest.mark.parametrize("stage", ["tokenizer", "detokenizer"])
def test_one_that_dies_again_while_it_takes_over(kit: Kit, wanted: list[Any], stage: str) -> None:
    for first in deaths_of(kit, stage)[::5]:
        for second in range(1 + first % 2, RECOVERY, 2):
            server = TextServer(kit, {stage: (first, second)}, lost=bool(second % 4 // 2))
            assert server.run(wanted) == wanted, (first, second)


def test_a_frontend_that_dies_again_while_it_takes_over(kit: Kit, wanted: list[Any]) -> None:
    for first in deaths_of(kit, "frontend")[::3]:
        for second in range(1 + first % 2, RECOVERY, 2):
            found = TextServer(kit, {"frontend": (first, second)}, lost=bool(second % 4 // 2)).run(wanted)
            assert all(one in (right, "cut") for one, right in zip(found, wanted, strict=True)), (first, second)


@settings(max_examples=40, deadline=None)
@given(st.fixed_dictionaries({stage: st.lists(st.integers(1, 120), max_size=2) for stage in STAGES}), st.booleans())
def test_all_of_them(kit: Kit, wanted: list[Any], deaths: dict[str, list[int]], lost: bool) -> None:
    found = TextServer(kit, deaths, lost).run(wanted)
    assert all(one in (right, "cut") for one, right in zip(found, wanted, strict=True))
    assert deaths["frontend"] or found == wanted


# ------------------------------------------------------------------ rules that are broken on purpose


def ready_before_the_row_is_written(patch: pytest.MonkeyPatch) -> str:
    write = TokenizerStage._write

    def early(self: Any, request: Any, *more: Any) -> None:
        self._ledger.ready[request.row] = request.generation
        write(self, request, *more)

    patch.setattr(TokenizerStage, "_write", early)
    return "tokenizer"


def accepted_before_it_is_handed_on(patch: pytest.MonkeyPatch) -> str:
    push = TokenizerStage._push

    def early(self: Any) -> None:
        for row, generation, prompt_len in self._ready:
            self._frontend.send({"ev": "accepted", "row": row, "gen": generation, "prompt_tokens": prompt_len})
        push(self)

    patch.setattr(TokenizerStage, "_push", early)
    return "tokenizer"


def a_stop_is_said_before_the_scheduler_is_told(patch: pytest.MonkeyPatch) -> str:
    say, tell = Detokenizer._say, Detokenizer._tell_scheduler
    late: list[Any] = []

    def said_first(self: Any, news: Any) -> Any:
        late.clear()
        told = say(self, news)
        for row in late:
            tell(self, *row)
        return told

    patch.setattr(Detokenizer, "_tell_scheduler", lambda _self, *row: late.append(row))
    patch.setattr(Detokenizer, "_say", said_first)
    return "detokenizer"


def said_again_from_the_beginning(patch: pytest.MonkeyPatch) -> str:
    patch.setattr(detokenizer, "wrong", lambda name: name == "text.ignores_delivered")
    return "detokenizer"


def a_row_is_left_before_it_is_aborted(patch: pytest.MonkeyPatch) -> str:
    send = RowTable.send

    def early(self: Any, row: Any, message: Any) -> None:
        if message["op"] == "leave":
            self._ledger.abort[row.number] = 0
        send(self, row, message)
        if message["op"] == "leave":
            self._ledger.abort[row.number] = row.generation

    patch.setattr(RowTable, "send", early)
    return "frontend"


@pytest.mark.parametrize(
    "plant",
    [
        ready_before_the_row_is_written,
        accepted_before_it_is_handed_on,
        a_stop_is_said_before_the_scheduler_is_told,
        said_again_from_the_beginning,
        a_row_is_left_before_it_is_aborted,
    ],
)
def test_a_wrong_order_is_found(
    kit: Kit, wanted: list[Any], plant: Callable[[pytest.MonkeyPatch], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = plant(monkeypatch)
    assert TextServer(kit).run() == wanted, "nobody sees it as long as nobody dies"
    seconds = range(1, RECOVERY) if stage == "frontend" else (0,)
    for first in deaths_of(kit, stage):
        for second in seconds:
            try:
                found = TextServer(kit, {stage: (first, second)}).run(wanted)
            except AssertionError:
                return
            if any(one not in (right, "cut") for one, right in zip(found, wanted, strict=True)):
                return
    raise AssertionError("nobody noticed")
