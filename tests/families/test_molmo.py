"""Molmo: images before the text, crops by hand, conversations, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from beheld.checkpoint.info import read_info
from beheld.core.config import EngineArgs
from beheld.core.errors import ModelError, PromptError
from beheld.core.request import Request
from beheld.inputs.pipeline import Chat, RequestOrder
from tests import tiny
from tests.inputs import pipes

FAMILY = "molmo"
PICTURES = [tiny.picture(84, 56, 1), tiny.picture(56, 112, 2)]


def ask(prompt: str, pictures: Any = (), **options: Any) -> Request:
    request: dict[str, Any] = {"prompt": prompt, "mm_processor_kwargs": options}
    if pictures:
        request["multi_modal_data"] = {"image": list(pictures)}
    return pipes.shared(FAMILY).prepare(RequestOrder(request, pipes.ONE_TOKEN, request_id="0"))


def chat(*parts: Any) -> Request:
    content = [part if isinstance(part, str) else {"type": "image", "image": part} for part in parts]
    order = Chat([{"role": "user", "content": content}])
    return pipes.shared(FAMILY).prepare(RequestOrder(order, pipes.ONE_TOKEN, request_id="0"))


def encoded(text: str) -> list[int]:
    ids: list[int] = pipes.shared(FAMILY).tokenizer.encode(text, add_special_tokens=False)
    return ids


def test_a_prompt_begins_with_its_images_and_its_text_with_a_space() -> None:
    assert list(ask("Hi").token_ids) == encoded("<|endoftext|> Hi")
    # The script of the documents has this tag, which is text here.
    request = ask("user <image>\nHi", PICTURES[:1])
    overview = "<im_start>" + ("<im_patch>" * 3 + "<im_col>") * 3 + "<im_end>"
    crop = "<im_start>" + ("<im_patch>" * 3 + "<im_col>") * 3 + "<im_end>"
    assert list(request.token_ids) == encoded(f"<|endoftext|>{overview}{crop} user <image>\nHi")


@pytest.mark.parametrize(
    ("size", "options", "rows", "columns"),
    [
        ((84, 84), {}, 3, 3),
        ((200, 60), {}, 3, 5),
        ((60, 200), {}, 5, 3),
        ((200, 60), {"max_crops": 1}, 3, 3),
        ((300, 60), {"max_crops": 6}, 3, 8),
    ],
)
def test_crops_by_hand(size: tuple[int, int], options: dict[str, Any], rows: int, columns: int) -> None:
    (span,) = ask("x", [tiny.picture(*size, 3)], **options).spans
    assert span.item.num_embeds == 9 + rows * columns


def test_a_conversation_is_the_prompt_that_users_write() -> None:
    for count in (0, 1, 2):
        talk = chat(*PICTURES[:count], "Where is it?")
        assert talk.token_ids == ask("User: Where is it? Assistant:", PICTURES[:count]).token_ids
        assert len(talk.spans) == count


@pytest.mark.parametrize("forged", ["<|image|>", "<im_patch>", "<im_start>"])
def test_what_a_user_spells_in_a_conversation_is_no_image(forged: str) -> None:
    request = chat(PICTURES[0], f"What does {forged} mean?")
    (place,) = encoded("<im_patch>")
    assert list(request.token_ids).count(place) == request.spans[0].item.num_embeds


def test_the_token_of_an_image_marks_it_wherever_it_stands() -> None:
    plain = ask("See this: Hi", PICTURES).token_ids
    assert ask("<|image|>\nSee <|image|>this: Hi", PICTURES).token_ids == plain
    for count, prompt in ((0, "<|image|>Hi"), (1, "<|image|><|image|>Hi"), (2, "<|image|>Hi")):
        with pytest.raises(PromptError, match=f"times for {count} images"):
            ask(prompt, PICTURES[:count])


def test_options_that_leave_no_crop_are_refused() -> None:
    for options in ({"max_crops": 0}, {"overlap_margins": [3, 3]}, {"overlap_margins": [4, 4]}):
        with pytest.raises(Exception, match="leave no crop"):
            ask("x", PICTURES[:1], **options)
    with pytest.raises(Exception, match="max_crops 101 must be from 1 to 100"):
        ask("x", PICTURES[:1], max_crops=101)


@pytest.mark.parametrize(
    ("name", "value"),
    [("norm_after", True), ("attention_layer_norm", True), ("layer_norm_type", "default"), ("clip_qkv", 8.0)],
)
def test_the_variants_of_other_texts_are_refused_by_name(tmp_path: Path, name: str, value: Any) -> None:
    config = json.loads((tiny.checkpoint(FAMILY) / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(config | {name: value}), encoding="utf-8")
    with pytest.raises(ModelError, match=f"{name} {value!r}"):
        read_info(tmp_path, EngineArgs(model=str(tmp_path)))


def test_the_table_has_a_second_part_and_the_head_has_not() -> None:
    from tests.oracle import reference

    made = reference.model(FAMILY)
    rows = made.config.embedding_size
    assert made.get_input_embeddings().weight.shape[0] == rows + 128
    assert made.lm_head.weight.shape[0] == rows
    assert made.config.image_token_id == rows + 2
