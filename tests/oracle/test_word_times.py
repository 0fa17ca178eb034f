"""The times of words equal transformers': of the same attention, of its own transcript, and as words are divided."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from transformers import WhisperForConditionalGeneration
from transformers.generation.utils import GenerateEncoderDecoderOutput
from transformers.models.whisper.generation_whisper import _dynamic_time_warping
from transformers.models.whisper.tokenization_whisper import _collate_word_timestamps, _combine_tokens_into_words

from beheld import AsyncLLM, SamplingParams, SpeechOrder
from beheld.api.word_times import last_states, word_groups
from beheld.core.errors import ModelError
from beheld.core.pooling_params import Alignment
from beheld.core.speech import SpeechPiece
from beheld.families.whisper.inputs import alignment_heads, median_width
from tests import tiny
from tests.oracle import whisper_reference as reference

TIMED = "<|startoftranscript|><|en|><|transcribe|>"
HEADS = ((1, 0), (1, 2))
SOUNDS = ((0.4, 2), (0.9, 0), (1.3, 6), (1.9, 2))


@cache
def model() -> Any:
    """The tiny checkpoint, whose attention can be read."""
    folder = tiny.checkpoint("whisper")
    return WhisperForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def heard(seconds: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The spectrogram of a sound, and which of its frames are no silence that fills it up."""
    options = {"sampling_rate": tiny.SOUND_RATE, "return_tensors": "pt", "return_attention_mask": True}
    made = reference.processor()(tiny.sound(seconds, seed), **options)
    return made["input_features"], made["attention_mask"]


def token_times(sound: tuple[float, int], prompt: list[int], answer: list[int]) -> list[float]:
    """transformers' times of an answer's tokens."""
    features, mask = heard(*sound)
    ids = torch.tensor([[*prompt, *answer]])
    with torch.inference_mode():
        attention = model()(features, decoder_input_ids=ids, output_attentions=True).cross_attentions
    made = GenerateEncoderDecoderOutput(sequences=ids, cross_attentions=(attention,))
    times = model()._extract_token_timestamps(
        made, [list(head) for head in HEADS], num_frames=int(mask.sum()), num_input_ids=len(prompt)
    )
    # The last one is a copy, for the end.
    return [float(time) for time in times[0, len(prompt) : -1]]


def make(**options: Any) -> AsyncLLM:
    """An engine that cuts prompts and shares prefixes."""
    folder, same = str(tiny.checkpoint("whisper")), {"dtype": "float32", "max_num_seqs": 8, "seed": 0, "block_size": 8}
    return AsyncLLM(folder, max_num_batched_tokens=10, **same, **({"num_gpu_blocks_override": 64} | options))


@pytest.fixture(scope="module")
def llm() -> Iterator[AsyncLLM]:
    """An engine with room for everything."""
    made = make()
    yield made
    made.close()


async def check(llm: AsyncLLM, times: int) -> None:
    """Align several answers at a time, while others are sampled, and compare all with transformers'."""
    prompt = reference.ids(TIMED)
    answers = [list(reference.answer(sound, TIMED, 40, rules="timestamps").token_ids[:-1]) for sound in SOUNDS]
    expected = [token_times(sound, prompt, answer) for sound, answer in zip(SOUNDS, answers, strict=True)]
    assert all(len(set(times)) > 6 for times in expected)

    async def aligned(sound: tuple[float, int], answer: list[int]) -> list[float]:
        audio = tiny.sound(*sound), tiny.SOUND_RATE
        asked = {"prompt_token_ids": [*prompt, *answer], "multi_modal_data": {"audio": audio}}
        frames = int(heard(*sound)[1].sum())
        weights_NE = await llm.aligned(asked, Alignment(HEADS, len(prompt), frames // 2))
        assert weights_NE.shape == (len(answer), frames // 2)
        return [0.02 * state for state in last_states(weights_NE)]

    async def sampled(sound: tuple[float, int]) -> list[int]:
        asked = {"prompt": TIMED, "multi_modal_data": {"audio": (tiny.sound(*sound), tiny.SOUND_RATE)}}
        async for output in llm.generate(asked, SamplingParams(temperature=0, max_tokens=40)):
            last = output
        return list(last.outputs[0].token_ids[:-1])

    for _ in range(times):
        aligning = [aligned(sound, answer) for sound, answer in zip(SOUNDS, answers, strict=True)]
        found = await asyncio.gather(*map(sampled, SOUNDS), *aligning)
        assert list(found[: len(SOUNDS)]) == answers
        for ours, theirs in zip(found[len(SOUNDS) :], expected, strict=True):
            assert ours == pytest.approx(theirs, abs=0.0201)


def test_times_of_tokens_equal_transformers(llm: AsyncLLM) -> None:
    """Prompts that are cut, and again when their prefix is known."""
    asyncio.run(check(llm, 2))
    assert asyncio.run(llm.ping()).scheduler.num_running == 0


def test_times_survive_preemption_and_overlap() -> None:
    llm = make(num_gpu_blocks_override=8, async_scheduling=True)
    try:
        # How many are preempted depends on when each is ready.
        for _ in range(10):
            asyncio.run(check(llm, 1))
            if preempted := asyncio.run(llm.ping()).scheduler.num_preemptions:
                break
        assert preempted
    finally:
        llm.close()


async def pieces_of(llm: AsyncLLM, sound: tuple[float, int], order: SpeechOrder) -> list[SpeechPiece]:
    audio = tiny.sound(*sound), tiny.SOUND_RATE
    return [piece async for piece in llm.transcribe(audio, order)]


def test_words_equal_those_of_transformers_own_transcript(llm: AsyncLLM) -> None:
    """Where one window holds all, and is heard once."""
    sound = (0.7, 1)
    features, mask = heard(*sound)
    made = model().generate(
        features,
        attention_mask=mask,
        language="en",
        task="transcribe",
        return_timestamps=True,
        return_token_timestamps=True,
    )
    ids, times = made["sequences"][0].tolist(), [round(time, 2) for time in made["token_timestamps"][0].tolist()]
    end = reference.ids("<|endoftext|>")[0]
    both = [(token, (times[place - 1], times[place])) for place, token in enumerate(ids) if token < end]
    before = asyncio.run(llm.ping()).scheduler.num_encoded
    (piece,) = asyncio.run(pieces_of(llm, sound, SpeechOrder(language="en", words=True)))
    # The audio's states are those that the transcript was read from.
    assert asyncio.run(llm.ping()).scheduler.num_encoded == before + 1
    assert [token for segment in piece.segments for token in segment.token_ids] == [token for token, _ in both]
    tokenizer, left = reference.processor().tokenizer, iter(both)
    for segment in piece.segments:
        own = itertools.islice(left, len(segment.token_ids))
        words = _collate_word_timestamps(tokenizer, *map(list, zip(*own, strict=True)), "english", False)
        assert [word.text for word in segment.words] == [word["text"].strip() for word in words]
        for word, other in zip(segment.words, words, strict=True):
            assert (word.start_s, word.stop_s) == pytest.approx(other["timestamp"], abs=0.0201)
    assert len({word.stop_s for segment in piece.segments for word in segment.words}) > 1


def test_words_of_long_audio_lie_in_their_windows(llm: AsyncLLM) -> None:
    order = SpeechOrder(language="en", words=True)
    pieces = asyncio.run(pieces_of(llm, (5.5, 3), order))
    segments = [segment for piece in pieces for segment in piece.segments]
    assert len({segment.window_s for segment in segments}) > 2
    for segment in segments:
        assert segment.words
        assert all(segment.window_s <= word.start_s <= word.stop_s <= segment.window_s + 2 for word in segment.words)
        assert "".join(word.text for word in segment.words).split() == "".join(segment.text.split()).split()
    untimed = asyncio.run(pieces_of(llm, (5.5, 3), SpeechOrder(language="en", timestamps=True)))
    assert [piece.text for piece in untimed] == [piece.text for piece in pieces]
    assert not any(segment.words for piece in untimed for segment in piece.segments)


def test_paths_equal_transformers() -> None:
    dice = np.random.default_rng(0)
    for tokens, states in ((1, 1), (1, 9), (7, 1), (4, 4), (9, 40), (40, 9), (24, 100)):
        for kind in range(3):
            weights = dice.normal(size=(tokens, states)).astype(np.float32)
            # Ties, too.
            weights = weights.round() if kind == 1 else weights * (kind < 2)
            text, time = _dynamic_time_warping(-weights.astype(np.float64))
            jumps = np.pad(np.diff(text), (1, 0), constant_values=1).astype(bool)
            assert last_states(weights) == time[jumps].tolist(), (tokens, states, kind)


@pytest.mark.parametrize(("language", "spaceless"), [("english", False), ("japanese", True)])
def test_words_are_divided_as_in_transformers(language: str, spaceless: bool) -> None:
    tokenizer = reference.processor().tokenizer
    texts = [" Say \"no\" (twice), please. It's 5 o'clock!", "日本語、はい。", " Grüße – ¿qué tal? [x]", " a . b ..."]
    cases = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    dice = np.random.default_rng(1)
    # Bytes that make no character.
    cases += [dice.integers(256, size=size).tolist() for size in (1, 2, 9, 30)]
    for ids in cases:
        words, _, places = _combine_tokens_into_words(tokenizer, ids, language)
        ours = word_groups(ids, lambda ids: tokenizer.decode(ids), spaceless=spaceless)
        assert ours == list(zip(words, places, strict=True))
        assert [place for _, own in ours for place in own] == list(range(len(ids)))


def test_damaged_heads_and_filters_are_refused() -> None:
    config = {"decoder_layers": 2, "decoder_attention_heads": 4}
    assert alignment_heads([[1, 0], [1, 2]], config) == HEADS
    assert alignment_heads(None, config) == ()
    for given in ("all", [1], [[1]], [[2, 0]], [[0, 4]], [[0, -1]], [[True, 0]]):
        with pytest.raises(ModelError, match="alignment_heads"):
            alignment_heads(given, config)
    assert (median_width({}), median_width({"median_filter_width": 9})) == (7, 9)
    for width in (0, 8, -1, 7.0, None, True, "7"):
        with pytest.raises(ModelError, match="median_filter_width"):
            median_width({"median_filter_width": width})
