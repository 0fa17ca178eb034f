"""Fields of a message's parts that the chat template reads reach it; all others are refused by name."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from beheld.server import limits
from beheld.utils import part_fields
from beheld.utils.part_fields import PartFields
from tests.interpreter_waits import longest_wait
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
POOLING = ("/v1/embeddings", "/classify", "/pooling")
ASKED = {"type": "predicate", "instructions": "Is it so?"}
CODES = {"source_lang_code": "en", "target_lang_code": "es"}


@pytest.fixture(scope="module")
def translator() -> Iterator[Running]:
    found = Running("qwen2_vl", ENGINE | {"chat_template": TRANSLATOR})
    yield found
    found.idle()
    found.close()


@pytest.fixture(scope="module")
def models() -> Iterator[dict[bool, Running]]:
    """One that pools, and one that does not."""
    found = {False: Running("qwen2", ENGINE), True: Running("qwen2", ENGINE | {"runner": "pooling"})}
    yield found
    for one in found.values():
        one.close()


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


def test_names_are_found_across_steps_and_lines() -> None:
    forms = ("a.{}", "a['{}']", 'a[ "{}" ]', "a.get(\n        '{}'", "'{}' in a", '"{}"\n    not in a')
    for number, form in enumerate(forms):
        for before in range(part_fields._LETTERS_A_STEP - 40, part_fields._LETTERS_A_STEP + 2):
            fields = PartFields(" " * before + form.format(f"name{number}") + " }}")
            assert fields.reads(f"name{number}"), (form, before)
            assert not fields.reads(f"name{number}"[:-1])


def test_a_long_template_is_searched_once_for_any_number_of_names() -> None:
    names = [f"a{number:06}" for number in range(100_000)]
    fields = PartFields("".join(f".{name} " for name in names))
    began = time.monotonic()
    assert fields.reads(names[0])
    # A search for each took 20 ms.
    assert not any(fields.reads(f"b{number}") for number in range(1000))
    assert time.monotonic() - began < 2.0


@pytest.mark.parametrize("text", ["x", "['a' ", ".aaaaaaaa(", "'a'  \n  not "])
def test_a_search_lets_other_threads_run(text: str) -> None:
    def work() -> None:
        assert not PartFields(text * ((8 << 20) // len(text))).reads("two")

    assert longest_wait(work) < 0.08


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
def test_a_template_that_is_not_accepted_is_refused_before_parts_are_read(translator: Running, path: str) -> None:
    part = {"type": "text", "text": "x", "of_the_client": "y"}
    body = {"messages": [{"role": "user", "content": [part]}], "chat_template": "{{ messages[0].of_the_client }}"}
    answer = translator.post(path, body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "chat_template")


def test_a_part_has_few_further_fields(translator: Running) -> None:
    part = {"type": "text", "text": "x", **{f"of_mine_{number}": 1 for number in range(limits.MAX_PART_FIELDS + 1)}}
    error = refused(translator, CHAT, part)
    assert error["param"] == "messages.0.content.0"
    assert f"at most {limits.MAX_PART_FIELDS} " in error["message"]


def test_a_clients_template_has_a_longest_length() -> None:
    running = Running("qwen2", ENGINE, trust_templates=True)
    try:
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
        template = "{{ messages[0].content".ljust(limits.MAX_TEMPLATE_LETTERS - 2) + "}}"
        assert running.post(CHAT, body | {"chat_template": template}).status_code == 200
        answer = running.post(CHAT, body | {"chat_template": " " + template})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "chat_template")
    finally:
        running.close()


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/decisions", {"input": [{"role": "user", "content": [None]}], "questions": [ASKED]}, "input.0.content.0"),
        ("/score", {"text_1": {"content": [None]}, "text_2": "x"}, "text_1.content.0"),
        ("/score", {"text_1": "x", "text_2": [{"content": [None]}]}, "text_2.0.content.0"),
        ("/rerank", {"query": "x", "documents": [{"content": [None]}]}, "documents.0.content.0"),
        ("/v2/embed", {"model": "m", "inputs": [{"content": [None]}]}, "inputs.0.content.0"),
        ("/v1/embeddings", {"messages": [{"role": "user", "content": [None]}]}, "messages.0.content.0"),
        ("/classify", {"messages": [{"role": "user", "content": [None]}]}, "messages.0.content.0"),
        ("/pooling", {"messages": [{"role": "user", "content": [None]}]}, "messages.0.content.0"),
        ("/v1/responses", {"input": [{"role": "user", "content": [None]}]}, "input.0.content.0"),
        ("/v1/messages", {"max_tokens": 1, "messages": [{"role": "user", "content": [None]}]}, "messages.0.content.0"),
        ("/v2/chat", {"model": "m", "messages": [{"role": "user", "content": [None]}]}, "messages.0.content.0"),
    ],
)
def test_no_route_drops_a_texts_unknown_field(
    models: dict[bool, Running], path: str, body: dict[str, Any], param: str
) -> None:
    kind = "input_text" if path == "/v1/responses" else "text"
    part = {"type": kind, "text": "x", "of_nobody": "y"}
    answer = models[path in POOLING].post_text(path, json.dumps(body).replace("null", json.dumps(part)))
    error = answer.json().get("error") or answer.json()
    assert answer.status_code == 400, error
    assert "of_nobody" in json.dumps(error)
    if "param" in error:
        assert error["param"] == f"{param}.of_nobody"
