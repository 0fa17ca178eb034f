"""Messages: harmless ones give the ids of apply_chat_template, every form of part is read, others are refused."""

from __future__ import annotations

import base64
import io
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from beheld.core.errors import ConfigError, MediaError, PromptError, TemplateError
from beheld.core.request import Request
from beheld.inputs.pipeline import Chat, RequestOrder
from tests import tiny
from tests.inputs import pipes
from tests.oracle import reference
from tests.server.slowness import slowness

TALK = [
    {"role": "system", "content": "You are terse."},
    {"role": "user", "content": "What is in this picture?"},
    {"role": "assistant", "content": "A large blue square."},
    {"role": "user", "content": "Where is it?  Say <b>it</b> {again} | \n twice: これ 100 %"},
]


def chat(family: str, messages: Any, **options: Any) -> Request:
    return pipes.shared(family).prepare(RequestOrder(Chat(messages, **options), pipes.ONE_TOKEN, request_id="0"))


def theirs(family: str, messages: list[dict[str, Any]], **options: Any) -> list[int]:
    """The ids of transformers' own apply_chat_template, on content as lists of parts where there is a processor."""
    processor = reference.processor(family)
    if family in tiny.TEXT_FAMILIES:
        return list(processor.apply_chat_template(messages, tokenize=True, return_dict=True, **options)["input_ids"])
    listed = [
        m if not isinstance(m["content"], str) else {**m, "content": [{"type": "text", "text": m["content"]}]}
        for m in messages
    ]
    made = processor.apply_chat_template(listed, tokenize=True, return_dict=True, return_tensors="pt", **options)
    return list(made["input_ids"][0].tolist())


def without_system(family: str, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The tiny Gemma and Llama templates take no system message, as the real ones."""
    return messages if family in ("qwen2", "qwen2_vl", "qwen2_5_vl", "llava_onevision", "llava") else messages[1:]


@pytest.mark.parametrize("family", pipes.CHAT_FAMILIES)
def test_text_gives_the_ids_of_the_template(family: str) -> None:
    talk = without_system(family, TALK)
    request = chat(family, talk)
    assert list(request.token_ids) == theirs(family, talk, add_generation_prompt=True)
    continued = [*talk, {"role": "assistant", "content": "It is"}]
    request = chat(family, continued, add_generation_prompt=False, continue_final_message=True)
    assert list(request.token_ids) == theirs(family, continued, continue_final_message=True)


@pytest.mark.parametrize("family", ["chameleon", "paligemma", "paligemma2", "fuyu", "florence2"])
def test_families_whose_prompts_are_closed_do_not_continue_a_message(family: str) -> None:
    picture = {"type": "image", "image": tiny.pictures(1)[0]}
    asked = {"role": "user", "content": [picture, {"type": "text", "text": "What is it?"}]}
    begun = {"role": "assistant", "content": "It is a"}
    with pytest.raises(
        PromptError, match=r"cannot continue a message: .*the answer (follows it|starts a new sequence)"
    ):
        chat(family, [asked, begun], add_generation_prompt=False, continue_final_message=True)
    assert chat(family, [asked, begun, asked] if family == "chameleon" else [asked]).token_ids


@pytest.mark.parametrize("family", ["blip2", "llava", "mantis"])
def test_a_continued_message_is_the_end_of_the_prompt(family: str) -> None:
    content = [{"type": "image", "image": tiny.pictures(1)[0]}, {"type": "text", "text": "What is it?"}]
    talk = [{"role": "user", "content": content}, {"role": "assistant", "content": "It is a"}]
    request = chat(family, talk, add_generation_prompt=False, continue_final_message=True)
    assert str(request.prompt).endswith("It is a")
    tokenizer = pipes.shared(family).tokenizer
    assert tokenizer.decode(request.token_ids[-6:]).endswith("It is a")


@pytest.mark.parametrize("family", sorted(set(pipes.CHAT_FAMILIES) & set(tiny.IMAGE_FAMILIES)))
def test_pictures_between_texts(family: str) -> None:
    first, second = tiny.pictures(2)
    content = [
        {"type": "image", "image": first},
        {"type": "text", "text": "This one,"},
        {"type": "image", "image": second},
        {"type": "text", "text": "or that one?"},
    ]
    request = chat(family, [{"role": "user", "content": content}])
    assert list(request.token_ids) == theirs(family, [{"role": "user", "content": content}], add_generation_prompt=True)
    assert len(request.spans) == 2


def test_every_form_of_a_picture_is_the_same_picture(tmp_path: Path) -> None:
    family = "qwen2_vl"
    pipe = pipes.make(family, allowed_local_media_path=str(tmp_path))
    picture = tiny.picture(84, 56, 1)
    data = pipes.encoded(picture)
    path = tmp_path / "a picture.png"
    path.write_bytes(data)
    text = base64.b64encode(data).decode()
    url = f"data:image/png;base64,{text}"
    parts: list[Any] = [
        {"type": "image_url", "image_url": {"url": url, "detail": "high"}},
        {"type": "image_url", "image_url": url},
        {"image_url": {"url": url}},
        {"type": "image", "image": picture},
        {"type": "image", "image": path},
        {"type": "image", "path": str(path)},
        {"type": "image", "base64": text},
        {"type": "image", "base64": url.replace("data:", "Data:")},
        {"type": "image", "url": path.as_uri()},
        {"type": "image_pil", "image_pil": picture},
        {"image": picture},
    ]
    for part in parts:
        messages = [{"role": "user", "content": [part, {"type": "text", "text": "Hi"}, "there"]}]
        request = pipe.prepare(RequestOrder(Chat(messages), pipes.ONE_TOKEN, request_id="0"))
        assert len(request.spans) == 1
        assert request.spans[0].item.digest == pipes.ask(pipe, family, picture).spans[0].item.digest, part


def test_videos_and_embeddings_as_parts() -> None:
    family = "qwen2_vl"
    content = [{"type": "video", "video": tiny.frames(4)}, {"type": "text", "text": "What moves?"}]
    request = chat(family, [{"role": "user", "content": content}])
    assert list(request.token_ids) == theirs(family, [{"role": "user", "content": content}], add_generation_prompt=True)
    tensor = torch.randn(4, pipes.info("llava").hidden_size)
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    for source in (tensor, base64.b64encode(buffer.getvalue()).decode()):
        content = [{"type": "image_embeds", "image_embeds": source}, {"type": "text", "text": "Hi"}]
        request = chat("llava", [{"role": "user", "content": content}])
        assert torch.equal(request.spans[0].item.features["embeds"], tensor)
    buffer = io.BytesIO()
    torch.save({"a": 1}, buffer)
    for bad in ("###", base64.b64encode(b"PK nothing").decode(), base64.b64encode(buffer.getvalue()).decode()):
        with pytest.raises(MediaError):
            chat("llava", [{"role": "user", "content": [{"type": "image_embeds", "image_embeds": bad}]}])


def test_options_of_a_part_are_options_of_its_item() -> None:
    family = "qwen2_vl"
    picture = tiny.picture(224, 145, 1)
    plain = chat(family, [{"role": "user", "content": [{"type": "image", "image": picture}]}])
    small = chat(
        family, [{"role": "user", "content": [{"type": "image", "image": picture, "max_pixels": 28 * 28 * 4}]}]
    )
    assert small.spans[0].item.num_embeds < plain.spans[0].item.num_embeds
    with pytest.raises(ValueError, match="'max_pixels'"):
        chat(family, [{"role": "user", "content": [{"type": "image", "image": picture, "max_pixel": 3}]}])


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "no messages"),
        ("Hi", "no messages"),
        (["Hi"], "not a mapping"),
        ([{"content": "Hi"}], "role"),
        ([{"role": "user\n", "content": "Hi"}], "role"),
        ([{"role": "im_end", "content": "Hi"}], "control token"),
        ([{"role": "user", "content": 3}], "neither text nor a list"),
        ([{"role": "user", "content": [3]}], "Part 1 of message 1"),
        ([{"role": "user", "content": [{"type": "text"}]}], "no text"),
        ([{"role": "user", "content": [{"type": "image"}]}], "holds no image"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "holds no image"),
        ([{"role": "user", "content": [{"type": "imag_url", "x": ""}]}], "'image_url'"),
        ([{"role": "user", "content": [{"type": "hologram"}]}], "Known"),
    ],
)
def test_malformed_messages_are_refused(messages: Any, words: str) -> None:
    with pytest.raises(PromptError, match=words):
        chat("qwen2_vl", messages)


def test_a_template_as_text_as_file_or_for_strings(tmp_path: Path) -> None:
    family = "llava"
    template = "{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}>"
    picture = tiny.picture(84, 56, 1)
    messages = [{"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": "Hi"}]}]
    request = chat(family, messages, chat_template=template)
    assert request.prompt == "[user] <image>\nHi >"
    assert len(request.spans) == 1
    path = tmp_path / "template.jinja"
    path.write_text(template)
    assert chat(family, messages, chat_template=str(path)).token_ids == request.token_ids
    with pytest.raises(TemplateError, match="neither a template nor a file"):
        chat(family, messages, chat_template=str(tmp_path / "none.jinja"))
    with pytest.raises(TemplateError, match="fails on these messages"):
        chat(family, messages, chat_template="{{ messages[0].content.nothing.at_all }}")
    with pytest.raises(TemplateError, match="0 placeholders for 1 image"):
        chat(family, messages, chat_template="{{ 'nothing' }}")
    with pytest.raises(ConfigError, match="content format"):
        chat(family, messages, content_format="xml")
    listed = "{% for p in messages[0].content %}{{ '<image>' if p.type == 'image' else p.text }}{% endfor %}"
    assert chat(family, messages, chat_template=listed).prompt == "<image>Hi"
    assert chat(family, [{"role": "user", "content": "Hi"}], chat_template=listed).prompt == "Hi"
    assert chat(family, messages, chat_template=template, content_format="string").token_ids == request.token_ids


def test_a_checkpoint_without_a_template(tmp_path: Path) -> None:
    import shutil

    from beheld.checkpoint.info import read_info
    from beheld.core.config import EngineArgs
    from beheld.inputs.pipeline import InputPipeline

    def bare(family: str) -> InputPipeline:
        folder = tmp_path / family
        shutil.copytree(
            tiny.checkpoint(family), folder, ignore=shutil.ignore_patterns("chat_template.*", "*.safetensors*")
        )
        settings = folder / "tokenizer_config.json"
        settings.write_text(
            json.dumps({k: v for k, v in json.loads(settings.read_text()).items() if k != "chat_template"})
        )
        args = EngineArgs(model=str(folder))
        model = read_info(folder, args)
        return InputPipeline(model, pipes.config(model), args)

    picture = tiny.picture(84, 56, 1)
    messages = [{"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": "Hi"}]}]
    texts = {}
    for family in ("llava", "qwen2_vl", "llava_onevision"):
        request = bare(family).prepare(RequestOrder(Chat(messages), pipes.ONE_TOKEN, request_id="0"))
        assert len(request.spans) == 1
        texts[family] = request.prompt
    assert texts["llava"] == "USER: <image>\nHi ASSISTANT:"
    assert "<|vision_start|><|image_pad|><|vision_end|>\nHi<|im_end|>" in str(texts["qwen2_vl"])
    with pytest.raises(TemplateError, match="chat_template"):
        bare("llama").prepare(RequestOrder(Chat([{"role": "user", "content": "Hi"}]), pipes.ONE_TOKEN, request_id="0"))


def test_tool_calls_reach_the_template_as_objects() -> None:
    calls = "{% for c in m.tool_calls or [] %}{{ c.function.arguments.place }}{% endfor %}"
    template = "{% for m in messages %}{{ m.role }}:{{ m.content or '' }}" + calls + ";{% endfor %}"
    call = {"type": "function", "function": {"name": "look", "arguments": '{"place": "here"}'}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "Seen.", "tool_call_id": "1"},
    ]
    assert chat("qwen2", messages, chat_template=template).prompt == "user:Look.;assistant:here;tool:Seen.;"


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("{", "{}"),
        ('{"a": 10', "{}"),
        ('{"a": "b", "n": -1', "{'a': 'b'}"),
        ('{"a": 1 ', "{'a': 1}"),
        ('{"a": [1', "{'a': []}"),
        ('{"a": "so f', "{'a': 'so f'}"),
        ('{"a": "so\\u00', "{'a': 'so'}"),
        ('{"a": 1, "b', "{'a': 1}"),
        ('{"a": [1, {"b": tr', "{'a': [1, {}]}"),
        ('{"a": "}],{", "b": "{', "{'a': '}],{', 'b': '{'}"),
        ('{"a": 1]', '{"a": 1]'),
        ('{"a": tru}', '{"a": tru}'),
        ("red", "red"),
    ],
)
def test_arguments_that_were_cut_off_are_taken_back(written: str, read: str) -> None:
    """The server sends them so where `max_tokens` ends an answer; the conversation failed with 400."""
    call = {"type": "function", "function": {"name": "look", "arguments": written}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    template = "{{ messages[0].tool_calls[0].function.arguments }}"
    assert str(chat("qwen2", messages, chat_template=template).prompt) == read


def test_half_a_call_of_many_escapes_takes_little_time() -> None:
    begin = time.thread_time()
    for written in ('{"a":"' + '\\"' * 400_000, '{"a":"' + "\\" * 400_001, '{"a":[' + "[]," * 40_000):
        call = {"type": "function", "function": {"name": "look", "arguments": written}}
        chat("qwen2", [{"role": "assistant", "content": None, "tool_calls": [call]}], chat_template="{{ 1 }}")
    assert time.thread_time() - begin < 5 * slowness(time.thread_time)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["[" * 70 + "]" * 70], "nested more than 64"),
        (["[" * 900 + "]" * 900], "nested"),
        (["[" * 60_000 + "]" * 60_000], "lists and objects|nested"),
        (["[" + "0," * 600_000 + "0]"], "values|characters"),
        (["[" + "0," * 6_000 + "0]"] * 100, "values|characters"),
        (["{" + ",".join(f'"k{number}": 1' for number in range(60_000)) + "}"], "keys"),
        (["[" + "[]," * 600 + "[]]"] * 100, "lists and objects"),
        (["9" * 5_000], "digits"),
    ],
    ids=["70 deep", "900 deep", "60,000 deep", "values", "values of many", "keys", "lists of many", "digits"],
)
def test_91_arguments_of_tool_calls_have_the_bounds_of_json(arguments: list[str], words: str) -> None:
    """All calls of a conversation together. One text of 60 MB took 2.9 GiB; what was deep failed with 500."""
    calls = [{"type": "function", "function": {"name": "look", "arguments": one}} for one in arguments]
    messages = [
        {"role": "user", "content": "Look."},
        *({"role": "assistant", "content": None, "tool_calls": [call]} for call in calls),
    ]
    begin = time.thread_time()
    with pytest.raises(PromptError, match=words) as caught:
        chat("qwen2", messages, chat_template="{{ messages }}")
    assert caught.value.remedy
    assert time.thread_time() - begin < 1.0 * slowness(time.thread_time)


def test_arguments_within_the_bounds_may_be_as_models_write_them() -> None:
    template = "{% for m in messages %}{{ (m.tool_calls or [{}])[0].function.arguments }}{% endfor %}"
    for written, read in (('{"a": 1, "a": 2}', "{'a': 2}"), ("[NaN]", "[nan]"), ("", "{}"), ("[" * 60 + "]" * 60, "[")):
        call = {"type": "function", "function": {"name": "look", "arguments": written}}
        messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
        assert read in str(chat("qwen2", messages, chat_template=template).prompt)


@pytest.mark.parametrize("sent", ["reasoning", "reasoning_content"])
def test_reasoning_reaches_templates_that_read_either_name(sent: str) -> None:
    template = "{{ messages[0]['reasoning'] }}|{{ messages[0]['reasoning_content'] }}|{{ messages[1] | length }}"
    talk = [{"role": "assistant", "content": "", sent: "Hm."}, {"role": "assistant", "content": ""}]
    request = chat("qwen2", talk, chat_template=template)
    assert request.prompt == "Hm.|Hm.|2"
    both = [{"role": "assistant", "content": "", "reasoning": "A", "reasoning_content": "B"}, talk[1]]
    assert chat("qwen2", both, chat_template=template).prompt == "A|B|2"


def test_generation_prompt_and_continuation_exclude_each_other() -> None:
    with pytest.raises(PromptError, match="Cannot set both"):
        chat("qwen2", TALK, continue_final_message=True)


@pytest.mark.parametrize("given", [3, "max_pixels", [("max_pixels", 3136)]], ids=str)
def test_processor_options_that_are_no_mapping_are_refused(given: Any) -> None:
    """In a conversation a number ended in a TypeError."""
    pipe = pipes.shared("qwen2_vl")
    with pytest.raises(PromptError, match="must be a mapping") as caught:
        pipe.prepare(
            RequestOrder(
                Chat([{"role": "user", "content": "Hi"}], mm_processor_kwargs=given), pipes.ONE_TOKEN, request_id="0"
            )
        )
    assert caught.value.remedy
    with pytest.raises(PromptError, match="must be a mapping"):
        pipe.prepare(RequestOrder({"prompt": "Hi", "mm_processor_kwargs": given}, pipes.ONE_TOKEN, request_id="0"))
