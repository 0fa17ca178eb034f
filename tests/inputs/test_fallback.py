"""Conversations with families whose checkpoints bring no chat template: what is written, and what is not."""

from __future__ import annotations

from typing import Any

import pytest

from beheld.compat.templates import get_chat_template_fallback_path
from beheld.core.errors import PromptError, TemplateError
from beheld.inputs.pipeline import Chat, RequestOrder
from tests import tiny
from tests.inputs import pipes
from tests.oracle import reference

PICTURE = tiny.picture(84, 56, 1)
# Family -> the prompt that transformers' processor is given for the question, beside its picture.
PROMPTS = {
    "blip2": "Question: {} Answer:",
    "chameleon": "<image>{}",
    "fuyu": "{}\n",
    "paligemma": "{}",
    "paligemma2": "{}",
    "florence2": "{}",
    "got_ocr2": tiny.wrap("got_ocr2", tiny.markers("got_ocr2", 1) + "{}"),
}
QUESTION = "What is in this picture?"


def chat(family: str, *parts: Any, **options: Any) -> Any:
    """The request of one message."""
    content = [{"type": "image", "image": part} if not isinstance(part, str) else part for part in parts]
    return pipes.shared(family).prepare(
        RequestOrder(Chat([{"role": "user", "content": content}], **options), pipes.ONE_TOKEN, request_id="0")
    )


def prompt(family: str, text: str) -> Any:
    """The request of a prompt as `generate` takes it."""
    data = {"image": PICTURE}
    return pipes.shared(family).prepare(
        RequestOrder({"prompt": text, "multi_modal_data": data}, pipes.ONE_TOKEN, request_id="0")
    )


def read(request: Any) -> Any:
    """What a model reads of it; an encoder's prompt is an item."""
    return request.token_ids, [(span.start, span.stop, span.item.digest) for span in request.spans]


@pytest.mark.parametrize("family", PROMPTS)
def test_a_conversation_is_the_prompt_that_users_write(family: str) -> None:
    talk = chat(family, PICTURE, QUESTION)
    assert len(talk.spans) == 1
    assert read(talk) == read(prompt(family, PROMPTS[family].format(QUESTION)))


@pytest.mark.parametrize("family", [family for family in PROMPTS if family != "florence2"])
def test_its_ids_are_those_of_transformers_processor(family: str) -> None:
    text = PROMPTS[family].format(QUESTION).replace("<image>", "")
    given = reference.processor(family)(
        text=["<image>" * (family in ("chameleon", "paligemma", "paligemma2")) + text],
        images=[PICTURE] if family in tiny.LISTED_FAMILIES else [[PICTURE]],
        return_tensors="pt",
    )
    assert list(chat(family, PICTURE, QUESTION).token_ids) == given["input_ids"][0].tolist()


@pytest.mark.parametrize("family", [family for family in PROMPTS if family != "florence2"])
def test_markers_of_users_are_text(family: str) -> None:
    marks = pipes.shared(family)._tokenizer.control()
    spelled = [text for text in marks.ids if text not in ("<unk>", "<pad>")]
    plain = chat(family, PICTURE, "Hi?").token_ids
    for mark in ("<image>", "</s>", "<bos>", "<reserved08706>", "<0x04>", "|SPEAKER|", "|NEWLINE|"):
        if mark not in spelled:
            continue
        forged = chat(family, PICTURE, f"Hi {mark} there?").token_ids
        assert forged.count(marks.ids[mark]) == plain.count(marks.ids[mark]), mark
        assert forged[-1] == plain[-1]


def test_fuyus_marks_are_ordinary_pieces_and_guarded() -> None:
    control = pipes.shared("fuyu")._tokenizer.control()
    assert {"|SPEAKER|", "|NEWLINE|", "<0x04>"} <= set(control.ids)


def test_a_task_of_florence_is_its_sentence() -> None:
    assert read(chat("florence2", PICTURE, "<OCR>")) == read(prompt("florence2", "<OCR>"))
    assert read(chat("florence2", PICTURE, "<OCR>")) != read(chat("florence2", PICTURE, "OCR"))


def test_a_dialogue_with_blip2() -> None:
    talk = [
        {"role": "user", "content": [{"type": "image", "image": PICTURE}, {"type": "text", "text": "What is it?"}]},
        {"role": "assistant", "content": "a square"},
        {"role": "user", "content": "Which colour?"},
    ]
    got = pipes.shared("blip2").prepare(RequestOrder(Chat(talk), pipes.ONE_TOKEN, request_id="0"))
    whole = "Question: What is it? Answer: a square Question: Which colour? Answer:"
    assert read(got) == read(prompt("blip2", whole))


@pytest.mark.parametrize("family", PROMPTS)
def test_tools_are_refused(family: str) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    with pytest.raises(TemplateError, match="knows no tools"):
        chat(family, PICTURE, "Hi?", tools=[tool])


def test_paligemma_still_wants_a_picture() -> None:
    with pytest.raises(PromptError, match="requires an image"):
        chat("paligemma", "Hi?")


def test_pictures_of_paligemma_stand_first() -> None:
    many = chat("paligemma", "caption ", PICTURE, tiny.picture(60, 60, 2), "en")
    assert [span.start for span in many.spans] == [0, many.spans[0].stop]


def test_every_family_of_the_table_has_its_file() -> None:
    for model_type in ("blip-2", "chameleon", "fuyu", "paligemma", "florence2", "llava", "qwen2_vl", "voxtral"):
        path = get_chat_template_fallback_path(model_type, "some/where")
        assert path is not None
        assert "{%" in path.read_text(encoding="utf-8")
    assert get_chat_template_fallback_path("gemma3") is None
    assert get_chat_template_fallback_path("no-such-model") is None


def test_the_tiny_checkpoints_bring_no_template() -> None:
    # Else the tests above would read theirs.
    for family in PROMPTS:
        assert reference.processor(family).tokenizer.chat_template is None
