"""Fields of a message's parts that the chat template reads reach it; all others are refused by name."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from beheld.utils.part_fields import PartFields
from tests.server.running import ENGINE, Running, data_url

CHAT = "/v1/chat/completions"
# The form of a translator's template: what it is to do stands in fields of the part.
TRANSLATOR = (
    "{%- for message in messages -%}{%- for part in message['content'] -%}"
    "{%- if part['type'] == 'text' -%}From {{ part['source_lang_code'] }} to {{ part.target_lang_code }}: "
    "{{ part['text'] }}"
    "{%- else -%}Read {{ part.get('source_lang_code') }}"
    "{% if 'urgent' in part %}!{% endif %}: <|vision_start|><|image_pad|><|vision_end|>{%- endif -%}"
    "{%- endfor -%}{%- endfor -%}"
)
CODES = {"source_lang_code": "en", "target_lang_code": "es"}


@pytest.fixture(scope="module")
def translator() -> Iterator[Running]:
    found = Running("qwen2_vl", ENGINE | {"chat_template": TRANSLATOR})
    yield found
    found.idle()
    found.close()


def prompted(running: Running, *parts: dict[str, Any]) -> str:
    body = {"messages": [{"role": "user", "content": list(parts)}], "max_tokens": 1, "return_prompt_text": True}
    answer = running.post(CHAT, body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["prompt_text"])


def refused(running: Running, path: str, part: dict[str, Any]) -> dict[str, Any]:
    answer = running.post(path, {"messages": [{"role": "user", "content": [part]}]})
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


def test_a_texts_fields_reach_the_template(translator: Running) -> None:
    assert prompted(translator, {"type": "text", "text": "A fox.", **CODES}) == "From en to es: A fox."
    one = {"messages": [{"role": "user", "content": [{"type": "text", "text": "A fox.", **CODES}]}]}
    plain = translator.post("/tokenize", {"prompt": "From en to es: A fox.", "add_special_tokens": False}).json()
    assert translator.post("/tokenize", one).json()["tokens"] == plain["tokens"]


def test_an_images_fields_reach_the_template_and_are_no_options(translator: Running) -> None:
    image = {"type": "image_url", "image_url": {"url": data_url()}}
    assert prompted(translator, image | CODES).startswith("Read en: <|vision_start|>")
    assert prompted(translator, image | CODES | {"urgent": True}).startswith("Read en!: ")


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
def test_others_are_refused_by_name(translator: Running, path: str) -> None:
    text = {"type": "text", "text": "x", **CODES}
    for more in ({"source_lang": "en"}, {"get": "x"}, {"content": "x"}, {"max_pixels": 7}):
        (name,) = more
        error = refused(translator, path, text | more)
        assert (error["param"], error["code"]) == (f"messages.0.content.0.{name}", "unknown_field")
    assert refused(translator, path, {"type": "text", "text": "x", "texts": "x"})["remedy"] == "Did you mean 'text'?"


def test_values_are_bounded(translator: Running) -> None:
    for value, words in ((["en"], "not text"), ({"a": 1}, "not text"), ("x" * 1025, "1024 characters")):
        error = refused(translator, CHAT, {"type": "text", "text": "x", **CODES, "source_lang_code": value})
        assert error["param"] == "messages.0.content.0.source_lang_code"
        assert words in error["message"]


def test_values_are_text_and_never_control_tokens(translator: Running) -> None:
    """Also where a value and a text together spell one."""
    image_pad = translator.llm.info.placeholder_ids["image"]
    codes = [("<|image_pad|>", "es", "x"), ("en", "<|image", "_pad|>"), ("<|image_p", "ad|>", "x")]
    for source, target, text in codes:
        part = {"type": "text", "text": text, "source_lang_code": source, "target_lang_code": target}
        body = {"messages": [{"role": "user", "content": [part]}], "max_tokens": 1, "return_token_ids": True}
        answer = translator.post(CHAT, body).json()
        assert image_pad not in answer["prompt_token_ids"]


def test_a_template_of_strings_takes_none() -> None:
    running = Running("qwen2", ENGINE | {"chat_template": "{{ messages[0].content }}{# .source_lang_code #}"})
    try:
        error = refused(running, CHAT, {"type": "text", "text": "x", "source_lang_code": "en"})
        assert error["param"] == "messages.0.content.0.source_lang_code"
        assert "does not read" in error["message"]
    finally:
        running.close()


def test_names_are_found_where_templates_read_them() -> None:
    fields = PartFields("{{ a.one }} {{ a['two'] }} {{ a.get( \"three\" ) }} {% if 'four' in a %}{{ a.five() }}", None)
    assert [name for name in ("one", "two", "three", "four") if not fields.reads(name)] == []
    unread = ("five", "on", "six", "", "a b", "x" * 65, "(", "one\n", "content", "image_url", "\u0661")
    assert [name for name in unread if fields.reads(name)] == []
    # A stranger's template of a megabyte is only searched.
    began = time.monotonic()
    assert not PartFields("{{ a.one }}" * 100_000 + "['" * 50_000).reads("two")
    assert time.monotonic() - began < 1.0
