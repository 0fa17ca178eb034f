"""Every form of a prompt, every mistake in one, and the limits."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
import pytest

from beheld.core.errors import LimitError, MediaError, ParamsError, PromptError, PromptTooLongError
from beheld.core.media import MediaRef
from beheld.core.params import SamplingParams
from beheld.inputs.pipeline import Chat, RequestOrder
from beheld.inputs.prompt.tokenizer import SHORT_TEXT
from tests import tiny
from tests.inputs import pipes
from tests.memory import peak
from tests.server.slowness import slowness

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
        ({"prompt": "a", "multi_modal_uuids": {"image": ["x"]}}, "multi_modal_data does not"),
        ([1, "a"], "whole numbers"),
        ([1, True], "whole numbers"),
        ([-1], "out of vocabulary"),
        ([10**6], "out of vocabulary"),
        ([], "empty"),
        ({"prompt": "a", "multi_modal_data": {"audio": (np.zeros(9), 16000)}}, "does not accept audio"),
    ],
)
def test_malformed_prompts_are_refused(prompt: Any, words: str) -> None:
    with pytest.raises(PromptError, match=words):
        prepare("qwen2_vl", prompt)


def test_a_text_model_takes_no_pictures() -> None:
    with pytest.raises(PromptError, match="text input only"):
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
    words = r"3 image items; limit_mm_per_prompt allows 2. At most 2 image\(s\) may be provided"
    with pytest.raises(LimitError, match=words):
        pipes.ask(pipe, family, ["http://127.0.0.1:9/never-fetched"] * 3)
    off = pipes.make(family, {"limit_per_prompt": {"image": 0}})
    with pytest.raises(LimitError, match="switched off"):
        pipes.ask(off, family, [PICTURE])
    assert off.prepare(RequestOrder("Hi", pipes.ONE_TOKEN, request_id="0")).token_ids


def test_only_a_limit_that_can_be_raised_is_said_to_be() -> None:
    most = pipes.info("qwen_vl").max_model_len
    for limit, advice in ((most, ""), (64, "raise max_model_len")):
        pipe = pipes.make("qwen_vl", {"max_model_len": limit})
        # Found by its ids, by its letters, and while it is tokenized.
        for prompt in ([5] * (limit + 1), "x" * 2_000_000, "a b " * limit):
            with pytest.raises(PromptTooLongError) as caught:
                pipe.prepare(RequestOrder(prompt, pipes.ONE_TOKEN, request_id="0"))
            assert caught.value.or_engine == advice, prompt[:9]


def test_a_prompt_too_long() -> None:
    family = "qwen2_vl"
    pipe = pipes.make(family, {"max_model_len": 30})
    with pytest.raises(PromptTooLongError, match="for media"):
        pipes.ask(pipe, family, tiny.pictures(4))
    with pytest.raises(PromptTooLongError, match="maximum context length is 30 tokens; the prompt has 30 tokens, "):
        pipe.prepare(RequestOrder([5] * 30, pipes.ONE_TOKEN, request_id="0"))
    assert len(pipe.prepare(RequestOrder([5] * 29, pipes.ONE_TOKEN, request_id="0")).token_ids) == 29
    small = pipes.make(family, {"max_encoder_tokens": 3})
    with pytest.raises(LimitError, match="mm_encoder_budget"):
        pipes.ask(small, family, [PICTURE])


def test_truncation_is_asked_for_and_never_cuts_media() -> None:
    params = SamplingParams(max_tokens=1, truncate_prompt_tokens=4)
    assert prepare("llama", [5, 6, 7, 8, 9, 10], params).token_ids == (7, 8, 9, 10)
    first = SamplingParams(max_tokens=1, truncate_prompt_tokens=4, truncation_side="right")
    assert prepare("llama", [5, 6, 7, 8, 9, 10], first).token_ids == (5, 6, 7, 8)
    # -1 leaves room for the answer.
    fitting = SamplingParams(max_tokens=10, truncate_prompt_tokens=-1)
    whole = list(range(5, 5 + 4000))
    kept = prepare("llama", [one % 100 for one in whole], fitting).token_ids
    assert kept == tuple(one % 100 for one in whole)[-len(kept) :]
    assert len(kept) < 4000
    family = "llava"
    with pytest.raises(ParamsError, match="truncate_prompt_tokens"):
        prepare(family, {"prompt": tiny.prompt(family, 1), "multi_modal_data": {"image": PICTURE}}, params)


@pytest.mark.parametrize("family", ["llama", "qwen2_vl", "llava"])
def test_90_of_a_long_text_that_is_truncated_only_the_end_is_read(family: str) -> None:
    """60 MiB took 8.3 GiB and 55 s. The ids are those of the whole text, with letters that are hard to cut, too."""
    pipe = pipes.make(family, {"max_model_len": 3000})
    keep = 2000
    params = SamplingParams(max_tokens=1, truncate_prompt_tokens=keep)
    first = SamplingParams(max_tokens=1, truncate_prompt_tokens=keep, truncation_side="right")
    words = ["the quick", "brown", "x" * 40, "\u00e9t\u00e9", "1234", "don't", "\n\n", "<|im_end|>", "</s>", "<s>"]
    text = " ".join(random.Random(90).choices(words, k=40_000))
    assert len(text) > 3 * SHORT_TEXT
    whole = pipe._tokenizer.encode(text, add_special_tokens=True)
    assert pipe.prepare(RequestOrder(text, params, request_id="0")).token_ids == tuple(whole[-keep:])
    assert pipe.prepare(RequestOrder(text, first, request_id="1")).token_ids == tuple(whole[:keep])
    begin = time.thread_time()
    with peak() as above:
        if pipe._tokenizer.tail(text, 1000) is None:
            # Its tokenizer reads texts as a whole.
            with pytest.raises(PromptTooLongError, match="characters"):
                pipe.prepare(RequestOrder("x y" * (20 << 20), params, request_id="0"))
        else:
            assert len(pipe.prepare(RequestOrder("x y" * (20 << 20), params, request_id="0")).token_ids) == keep
    assert above[0] < 128 << 20
    assert time.thread_time() - begin < 2.0 * slowness(time.thread_time)


def test_90_a_long_conversation_is_truncated_to_the_ids_of_its_whole() -> None:
    pipe = pipes.make("qwen2_vl", {"max_model_len": 3000})
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    for spelled in ("", "<|im_end|> "):
        text = spelled + "the quick brown fox jumps, over the lazy dog. " * 6_000
        messages = [{"role": "user", "content": text}, {"role": "user", "content": f"{spelled}go on"}]
        found = [
            pipe.prepare(
                RequestOrder(
                    Chat(messages, template, add_generation_prompt=False),
                    SamplingParams(max_tokens=1, truncate_prompt_tokens=keep),
                    request_id="0",
                )
            ).token_ids
            for keep in (5, 1000, 2500)
        ]
        # What is read of it differs in length.
        assert found[2][-5:] == found[0]
        assert found[2][-1000:] == found[1]
        ends = pipe._tokenizer.encode(" dog. <|im_end|>\n", add_special_tokens=False)[-2:]
        assert found[0][-2:] == tuple(ends)
        marks = [token for token in found[2] if token == ends[0]]
        # What the template writes is a token, what users spell is not.
        assert len(marks) == 2
    with pytest.raises(PromptTooLongError, match="characters"):
        pipe.prepare(
            RequestOrder(
                Chat([{"role": "user", "content": "x y" * (20 << 20)}]),
                SamplingParams(max_tokens=1, truncate_prompt_tokens=5),
                request_id="0",
            )
        )


def test_90_a_text_that_can_only_be_read_as_a_whole_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = pipes.make("llama", {"max_model_len": 3000})
    monkeypatch.setattr(pipe._tokenizer, "tail", lambda text, size: None)
    params = SamplingParams(max_tokens=1, truncate_prompt_tokens=5)
    with pytest.raises(PromptTooLongError, match="characters"):
        pipe.prepare(RequestOrder("x y" * (20 << 20), params, request_id="0"))
    assert len(pipe.prepare(RequestOrder("x y" * 25_000, params, request_id="0")).token_ids) == 5


@pytest.mark.parametrize("form", [list, tuple, lambda ids: {"prompt_token_ids": ids}], ids=["list", "tuple", "mapping"])
def test_94_too_many_ids_are_refused_before_each_is_looked_at(form: Any) -> None:
    class Unseen(int):
        """An id that must not be looked at."""

        def __lt__(self, other: object) -> bool:
            raise AssertionError("looked at")

        __gt__ = __le__ = __ge__ = __lt__

    pipe = pipes.make("llama", {"max_model_len": 3000})
    ids = form([Unseen(5)] * 524_000)
    begin = time.thread_time()
    with pytest.raises(PromptTooLongError, match="524000 tokens"):
        pipe.prepare(RequestOrder(ids, pipes.ONE_TOKEN, request_id="0"))
    assert time.thread_time() - begin < 0.05 * slowness(time.thread_time)
    kept = form([Unseen(5)] * 524_000 + [6, 7, 8])
    params = SamplingParams(max_tokens=1, truncate_prompt_tokens=3)
    assert pipe.prepare(RequestOrder(kept, params, request_id="0")).token_ids == (6, 7, 8)


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
