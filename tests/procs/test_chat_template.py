"""Templates render as the models' authors meant, and nothing in a request can do more than fail."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from procs import chat_template
from procs.chat_template import ChatTemplate, TemplateBroken
from procs.prompt_checks import BadRequest
from tests.model_factory import CHAT_TEMPLATE

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nBe helpful<|im_end|>\\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def render(source: str, messages: object, add_generation_prompt: bool = True, **special_tokens: str) -> str:
    return ChatTemplate(source, special_tokens).render(messages, add_generation_prompt)


def user(content: object) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def test_chatml() -> None:
    begin = "<|im_start|>system\nBe helpful<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    assert render(SMOLLM2, user("Hi")) == begin + "<|im_start|>assistant\n"
    assert render(SMOLLM2, user("Hi"), False) == begin


def test_content_may_be_text_parts() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert render("{{ messages[0].content }}", user(parts)) == "one\ntwo"
    assert render("{{ messages[0].content }}", user([])) == ""
    assert render("{{ messages[0].content }}", [{"role": "assistant", "content": None}]) == ""


@pytest.mark.parametrize(
    "messages",
    [
        None,
        [],
        "Hi",
        ["Hi"],
        [{}],
        [{"role": "user"}],
        [{"content": "Hi"}],
        [{"role": 1, "content": "Hi"}],
        user(1),
        user(None),
        user({"type": "text", "text": "Hi"}),
        user([{"type": "image_url", "image_url": {"url": "x"}}]),
        user([{"type": "text"}]),
        user([{"type": "text", "text": 1}]),
        user(["Hi"]),
        user("\ud800"),
    ],
)
def test_messages_of_another_form_are_refused(messages: object) -> None:
    with pytest.raises(BadRequest) as caught:
        render(CHAT_TEMPLATE, messages)
    assert (caught.value.status, caught.value.param) == (400, "messages")


def test_what_templates_use() -> None:
    assert render("{{ bos_token }}|{{ eos_token }}", user("a"), bos_token="<s>") == "<s>|"
    assert render("{{ tools is none }}{{ documents is none }}", user("a")) == "TrueTrue"
    assert render("{{ {'é': '<&>', 'a': [1]} | tojson }}", user("a")) == '{"é": "<&>", "a": [1]}'
    assert render("{{ {'b': 1, 'a': 2} | tojson(indent=2) }}", user("a")) == '{\n  "b": 1,\n  "a": 2\n}'
    assert len(render("{{ strftime_now('%Y-%m-%d') }}", user("a"))) == 10
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", user("a")) == "01"
    assert render("a{% generation %}b{{ messages[0].content }}{% endgeneration %}c", user("x")) == "abxc"
    assert render("  {% if true %}\nx\n  {% endif %}\ny", user("a")) == "x\ny"
    assert render("{{ messages[0].content }}", user("<b>{{ 7 * 7 }}</b>")) == "<b>{{ 7 * 7 }}</b>"


def test_the_template_may_refuse_messages() -> None:
    with pytest.raises(BadRequest, match="roles must alternate") as caught:
        render("{{ raise_exception('roles must alternate') }}", user("a"))
    assert (caught.value.status, caught.value.param) == (400, "messages")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[9].content + 'x' }}",
        "{{ messages[0].content + 1 }}",
        "{{ 1 / 0 }}",
        "{{ messages.nothing.at_all }}",
        "{{ messages | tojson | int('x') + missing() }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% set _ = messages[0].update({'role': 'x'}) %}",
        "{% for i in range(10000000) %}{% endfor %}",
        "{{ strftime_now(1) }}",
    ],
)
def test_whatever_goes_wrong_names_messages(source: str) -> None:
    with pytest.raises(BadRequest) as caught:
        render(source, user("a"))
    assert caught.value.param == "messages"


def test_output_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "RENDERED_CHARS_MAX", 1000)
    source = "{% for i in range(1000) %}{{ messages[0].content }}{% endfor %}"
    assert render(source, user("x")) == "x" * 1000
    with pytest.raises(BadRequest, match="too much text"):
        render(source, user("xx"))


@pytest.mark.parametrize("source", ["{% for %}", "{{ 'open }}", "{% if x %}", "{{ x | no_such_filter }}"])
def test_a_broken_template_is_told_at_the_start(source: str) -> None:
    with pytest.raises(TemplateBroken, match="line 1"):
        ChatTemplate(source, {})


@given(st.text(max_size=30))
def test_content_comes_through_unchanged(text: str) -> None:
    assert render("<{{ messages[0].content }}>", user(text)) == f"<{text}>"


@pytest.mark.model
def test_the_default_model_s_template_gives_the_ids_on_record() -> None:
    from procs.model_files import DEFAULT_MODEL, load_tokenizer, resolve_model
    from procs.tokenizer import load_template

    path = resolve_model(DEFAULT_MODEL)
    tokenizer, template = load_tokenizer(path), load_template(str(path))
    assert template is not None
    lines = (Path(__file__).parent.parent / "data" / "smollm2_greedy.jsonl").read_text().splitlines()
    chats = [line for line in map(json.loads, lines) if line["chat"]]
    assert chats
    for line in chats:
        text = template.render(user(line["prompt"]))
        assert tokenizer.encode(text, add_special_tokens=False).ids == line["prompt_ids"]
