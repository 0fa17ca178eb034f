"""Every form of a prompt, every mistake in one, and the limits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from beheld.core.errors import LimitError, MediaError, ParamsError, PromptError, PromptTooLongError
from beheld.core.media import MediaRef
from beheld.core.params import SamplingParams
from beheld.inputs.pipeline import RequestOrder
from tests import tiny
from tests.inputs import pipes

PICTURE = tiny.picture(84, 56, 1)


def prepare(family: str, prompt: Any, params: SamplingParams = pipes.ONE_TOKEN, **options: Any) -> Any:
    return pipes.shared(family).prepare(RequestOrder(prompt, params, request_id="r", **options))


def test_forms_of_text_and_ids() -> None:
    tokenizer = pipes.shared("llama").tokenizer
    text = "What is in this picture?"
    ids = tokenizer(text)["input_ids"]
    for prompt in (
        text,
        {"prompt": text},
        ids,
        tuple(ids),
        np.array(ids),
        {"prompt_token_ids": ids},
        {"prompt": text, "multi_modal_data": None},
        {"prompt": text, "multi_modal_data": {"image": None}, "mm_processor_kwargs": None},
    ):
        assert list(prepare("llama", prompt).token_ids) == ids
    ranked = pipes.make("llama", {"policy": "priority"})
    salted = {"prompt": text, "cache_salt": "mine"}
    request = ranked.prepare(RequestOrder(salted, pipes.ONE_TOKEN, request_id="r", priority=3, arrival=1.5))
    assert (request.salt, request.priority, request.arrival, request.id) == (b"mine", 3, 1.5, "r")
    assert request.prompt == text


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        (3, "cannot be a int"),
        ({}, "either"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "exactly one"),
        ({"promt": "a"}, "'prompt'"),
        ({"prompt": 3}, "must be text"),
        ({"prompt": "a", "cache_salt": ""}, "cache_salt"),
        ({"prompt": "a", "mm_processor_kwargs": [1]}, "mapping"),
        ({"prompt": "a", "multi_modal_data": [1]}, "mapping"),
        ({"prompt": "a", "multi_modal_data": {"images": PICTURE}}, "'image'"),
        ({"prompt": "a", "multi_modal_uuids": {"image": ["x"]}}, "no data"),
        ([1, "a"], "whole numbers"),
        ([1, True], "whole numbers"),
        ([-1], "outside the vocabulary"),
        ([10**6], "outside the vocabulary"),
        ([], "empty"),
        ({"prompt": "a", "multi_modal_data": {"audio": (np.zeros(9), 16000)}}, "does not take audio"),
    ],
)
def test_malformed_prompts_are_refused(prompt: Any, words: str) -> None:
    with pytest.raises(PromptError, match=words):
        prepare("qwen2_vl", prompt)


def test_a_text_model_takes_no_pictures() -> None:
    with pytest.raises(PromptError, match="text only"):
        prepare("llama", {"prompt": "Hi", "multi_modal_data": {"image": PICTURE}})


@pytest.mark.parametrize("family", pipes.IMAGE_FAMILIES)
@pytest.mark.parametrize(("markers", "items"), [(0, 1), (1, 0), (1, 2), (3, 2)])
def test_markers_must_match_the_media(family: str, markers: int, items: int) -> None:
    prompt = {"prompt": tiny.prompt(family, markers), "multi_modal_data": {"image": [PICTURE] * items}}
    with pytest.raises(PromptError) as caught:
        prepare(family, prompt)
    message = str(caught.value)
    assert f"has {markers} of the placeholder" in message
    assert f"{items} image" in message
    assert pipes.shared(family)._tokenizer.placeholder("image") in message
    if family.startswith("qwen") and items:
        assert "<|vision_start|><|image_pad|><|vision_end|>" in message


def test_forms_of_pictures() -> None:
    family = "qwen2_vl"
    array = np.asarray(PICTURE)
    digest = pipes.ask(pipes.shared(family), family, [PICTURE]).spans[0].item.digest
    for value in (
        PICTURE,
        array,
        [array],
        (PICTURE,),
        array[None],
        pipes.encoded(PICTURE),
        bytearray(pipes.encoded(PICTURE)),
    ):
        data = {"prompt": tiny.prompt(family, 1), "multi_modal_data": {"image": value}}
        assert prepare(family, data).spans[0].item.digest == digest
    two = {"prompt": tiny.prompt(family, 2), "multi_modal_data": {"image": np.stack([array, array])}}
    assert [span.item.digest for span in prepare(family, two).spans] == [digest, digest]
    for bad in ([PICTURE, None], 7, {1: 2}, object()):
        with pytest.raises((MediaError, PromptError)):
            prepare(family, {"prompt": tiny.prompt(family, 2), "multi_modal_data": {"image": bad}})


def test_names_given_by_the_caller() -> None:
    family = "qwen2_vl"
    data = {
        "prompt": tiny.prompt(family, 1),
        "multi_modal_data": {"image": PICTURE},
        "multi_modal_uuids": {"image": "a"},
    }
    request = prepare(family, data)
    assert request.receipts[0].given["uuid"] == "a"
    other = prepare(family, data | {"multi_modal_data": {"image": tiny.picture(84, 56, 2)}})
    assert other.spans[0].item.digest != request.spans[0].item.digest, "a name is not content"
    with pytest.raises(PromptError, match="2 names for 1"):
        prepare(family, data | {"multi_modal_uuids": {"image": ["a", "b"]}})


def test_limits_per_prompt() -> None:
    family = "llava"
    pipe = pipes.make(family, {"limit_per_prompt": {"image": 2}})
    assert pipes.ask(pipe, family, [PICTURE] * 2).spans
    with pytest.raises(LimitError, match="3 image items; limit_mm_per_prompt allows 2"):
        pipes.ask(pipe, family, ["http://127.0.0.1:9/never-fetched"] * 3)
    off = pipes.make(family, {"limit_per_prompt": {"image": 0}})
    with pytest.raises(LimitError, match="switched off"):
        pipes.ask(off, family, [PICTURE])
    assert off.prepare(RequestOrder("Hi", pipes.ONE_TOKEN, request_id="0")).token_ids


def test_a_prompt_too_long() -> None:
    family = "qwen2_vl"
    pipe = pipes.make(family, {"max_model_len": 30})
    with pytest.raises(PromptTooLongError, match="for media"):
        pipes.ask(pipe, family, tiny.pictures(4))
    with pytest.raises(PromptTooLongError, match=r"30 tokens; .* the limit is 30"):
        pipe.prepare(RequestOrder([5] * 30, pipes.ONE_TOKEN, request_id="0"))
    assert len(pipe.prepare(RequestOrder([5] * 29, pipes.ONE_TOKEN, request_id="0")).token_ids) == 29
    small = pipes.make(family, {"max_encoder_tokens": 3})
    with pytest.raises(LimitError, match="mm_encoder_budget"):
        pipes.ask(small, family, [PICTURE])


def test_truncation_is_asked_for_and_never_cuts_media() -> None:
    params = SamplingParams(max_tokens=1, truncate_prompt_tokens=4)
    assert prepare("llama", [5, 6, 7, 8, 9, 10], params).token_ids == (7, 8, 9, 10)
    family = "llava"
    with pytest.raises(ParamsError, match="truncate_prompt_tokens"):
        prepare(family, {"prompt": tiny.prompt(family, 1), "multi_modal_data": {"image": PICTURE}}, params)


def test_counting_without_a_prompt() -> None:
    family = "llava_onevision"
    pipe = pipes.make(family)
    picture = tiny.picture(168, 84, 1)
    refs = [MediaRef("image", picture), MediaRef("video", tiny.frames(4))]
    receipts = pipe.receipts(refs)
    assert [(receipt.item, receipt.index) for receipt in receipts] == [("image 1", 0), ("video 1", 0)]
    request = pipes.ask(pipe, family, [picture], [tiny.frames(4)])
    assert [receipt.tokens for receipt in request.receipts] == [receipt.tokens for receipt in receipts]
    assert all(receipt.cached for receipt in request.receipts)
