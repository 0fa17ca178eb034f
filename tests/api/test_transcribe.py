"""Windows of long audio: where they end, and how timestamps divide them."""

from __future__ import annotations

import asyncio
import random
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.models.whisper.generation_whisper import WhisperGenerationMixin

from beheld import AsyncLLM, SamplingParams
from beheld.api.speech_windows import cuts, divided
from beheld.api.transcribe import Fallback, Transcription, check
from beheld.core.beams import BeamSearchParams
from beheld.core.errors import ParamsError
from beheld.core.speech import LANGUAGES, SpeechForm, SpeechOrder, SpeechPiece, SpeechTokens
from tests import census, census_media, tiny

FIRST, END, WINDOW_S = 100, 50, 30.0


def theirs(ids: list[int]) -> tuple[list[tuple[float, float, tuple[int, ...]]], float]:
    """What transformers makes of a window's tokens: segments, and where the next window starts, in seconds."""
    frames = 3000
    segments, offset = WhisperGenerationMixin._retrieve_segment(
        seek_sequence=torch.tensor(ids),
        seek_outputs=[{"sequences": torch.tensor(ids)}],
        time_offset=torch.tensor([0.0], dtype=torch.float64),
        timestamp_begin=FIRST,
        seek_num_frames=torch.tensor([frames]),
        time_precision=0.02,
        time_precision_features=0.01,
        input_stride=2,
        prev_idx=0,
        idx=0,
        return_token_timestamps=False,
        decoder_input_ids=torch.zeros(1, 0),
    )
    made = [
        (
            round(float(one["start"]), 2),
            round(float(one["end"]), 2),
            tuple(token for token in one["tokens"].tolist() if token < END),
        )
        for one in segments
    ]
    return made, round(float(offset) / 100, 2)


def test_timestamps_divide_a_window_as_in_transformers() -> None:
    dice = random.Random(1)
    kinds = set()
    for _ in range(400):
        ids, now = [FIRST + dice.randrange(10)], 10
        for _ in range(dice.randrange(5)):
            ids += [dice.randrange(END) for _ in range(dice.randrange(1, 4))]
            now += dice.randrange(1, 300)
            ids += [FIRST + now] * dice.choice((1, 2))
        ids += [dice.randrange(END) for _ in range(dice.randrange(3))]
        made, next_s = divided(ids, FIRST, END, 0.02, WINDOW_S)
        ours = [(round(one.start_s, 2), round(one.stop_s, 2), one.token_ids) for one in made]
        expected, offset = theirs(ids)
        assert (ours, round(next_s, 2)) == (expected, offset), ids
        # The end is no part of it.
        assert divided([*ids, END], FIRST, END, 0.02, WINDOW_S) == (made, next_s)
        kinds.add((len(made) > 1, next_s == WINDOW_S))
    assert len(kinds) == 4


def test_windows_cover_the_audio_and_end_where_it_is_quiet() -> None:
    rate = 1000
    samples = np.ones(75_000, dtype=np.float32)
    for quiet in (29_400, 58_950):
        samples[quiet : quiet + 200] = 0
    found = list(cuts(samples, rate, 30.0))
    assert [start for start, _ in found[1:]] == [stop for _, stop in found[:-1]]
    assert (found[0][0], found[-1][1]) == (0, len(samples))
    assert all(stop - start <= 30_000 for start, stop in found)
    assert all(not samples[stop] for _, stop in found[:-1])
    assert list(cuts(samples[:30_000], rate, 30.0)) == [(0, 30_000)]
    assert list(cuts(np.ones(2500, dtype=np.float32), rate, 1.0))[-1][1] == 2500


def test_what_a_model_cannot_do_is_refused() -> None:
    form = SpeechForm("Write it down{language}.", written=True)
    for order, match in (
        (SpeechOrder(language="klingon"), "language"),
        (SpeechOrder(translate=True), "does not translate"),
        (SpeechOrder(prompt="Before it"), "takes no prompt"),
    ):
        with pytest.raises(ParamsError, match=match):
            check(order, form, None, "the model")
    assert form.text(SpeechOrder(language="de")) == "Write it down in German."
    assert form.text(SpeechOrder()) == "Write it down."
    asked = SpeechForm("<s>{prompt}</s>{language}", written=True)
    order = SpeechOrder(prompt="of {language}", language="de")
    check(order, asked, None, "the model")
    assert asked.text(order) == "<s>of {language}</s> in German"
    assert asked.text(SpeechOrder()) == "<s></s>"
    own = SpeechForm("</s>__{code}__", written=True, codes={"de": "deu", "en": "eng"})
    assert own.text(SpeechOrder(language="de")) == "</s>__deu__"
    assert own.text(SpeechOrder()) == "</s>__eng__"
    with pytest.raises(ParamsError, match="The language 'zu' is not one"):
        check(SpeechOrder(language="zu"), own, None, "a model")
    assert replace(own, unnamed="any").text(SpeechOrder()) == "</s>__any__"
    assert LANGUAGES["yue"] == "Cantonese"


@pytest.mark.parametrize(
    ("heads", "ranks", "match"), [((), 1, "gives no times"), (((1, 0),), 2, "several ranks"), (((1, 0),), 1, "")]
)
def test_times_of_words_need_heads_and_one_rank(heads: Any, ranks: int, match: str) -> None:
    llm: Any = SimpleNamespace(
        info=SimpleNamespace(name="a model"),
        config=SimpleNamespace(num_ranks=ranks),
    )
    tokens = SpeechTokens(1, 2, {}, 3, FIRST, END, {}, alignment_heads=heads)
    order = SpeechOrder(words=True)
    with pytest.raises(ParamsError, match=match) if match else nullcontext():
        Transcription(llm, SpeechForm(), tokens, order, SamplingParams(), "name")


async def transcript(llm: AsyncLLM, order: SpeechOrder, seconds: float, fallback: Fallback | None) -> list[SpeechPiece]:
    audio = tiny.sound(seconds, 3), tiny.SOUND_RATE
    return [piece async for piece in llm.transcribe(audio, order, fallback=fallback)]


def test_the_fallback_tries_temperatures_and_drops_silence() -> None:
    async def run() -> None:
        options = {"dtype": "float32", "max_num_seqs": 4, "num_gpu_blocks_override": 64, "seed": 0}
        async with AsyncLLM(str(tiny.checkpoint("whisper")), **options) as llm:
            order = SpeechOrder(language="en", timestamps=True)
            (plain,) = await transcript(llm, order, 1.3, None)
            assert {one.temperature for one in plain.segments} == {0}
            (never,) = await transcript(llm, order, 1.3, Fallback(logprob=-100.0, compression=100.0))
            assert never.text == plain.text
            assert never.segments[0].silence is not None
            # The tiny model's tokens are never that probable: the last temperature is taken.
            rule = Fallback((0.0, 0.5), logprob=-1e-6, silence=2.0)
            (hot,) = await transcript(llm, order, 1.3, rule)
            assert {one.temperature for one in hot.segments} == {0.5}
            (silent,) = await transcript(llm, order, 1.3, Fallback(logprob=0.0, silence=-1.0))
            assert (silent.text, silent.segments) == ("", ())

    asyncio.run(run())


@pytest.mark.parametrize("kind", ["moonshine", "moonshine_streaming"])
def test_a_transcript_is_as_long_as_the_card_allows(kind: str, tmp_path: Path) -> None:
    """transformers' example of Moonshine's card: max_length, with the start, is 6.5 tokens a second."""
    recipe = census.RECIPES[kind]
    census_media.make(kind, recipe, tmp_path)

    async def run() -> None:
        endless = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
        options = {"dtype": "float32", "max_num_seqs": 4, "max_model_len": 64, "num_gpu_blocks_override": 64}
        async with AsyncLLM(str(tmp_path), **options) as llm:

            async def count(seconds: float, params: SamplingParams | None, **more: Any) -> int:
                audio = tiny.sound(seconds, 3), tiny.SOUND_RATE
                made = llm.transcribe(audio, SpeechOrder(), params, **more)
                return sum([piece.num_tokens async for piece in made])

            assert [await count(seconds, endless) for seconds in (1.0, 2.0, 3.0)] == [5, 12, 18]
            short = endless.clone()
            short.max_tokens = 4
            assert await count(2.0, short) == 4
            beams = BeamSearchParams(beam_width=2, max_tokens=30, ignore_eos=True)
            assert await count(2.0, None, beams=beams) == 12

    asyncio.run(run())


def test_a_written_prompt_asks_voxtral() -> None:
    async def run() -> None:
        options = {"dtype": "float32", "max_num_seqs": 4, "num_gpu_blocks_override": 64, "max_model_len": 512}
        async with AsyncLLM(str(tiny.checkpoint("voxtral")), **options) as llm:
            form, _ = llm.speech or (None, None)
            assert form is not None
            prompt = form.text(SpeechOrder(language="en"))
            assert prompt == "<s>[INST][BEGIN_AUDIO][AUDIO][/INST]lang:en[TRANSCRIBE]"
            ids = await llm.token_ids(prompt, add_special_tokens=False)
            assert [llm.tokenizer.convert_ids_to_tokens(ids[place]) for place in (0, 1, 2, 3, -1)] == [
                "<s>",
                "[INST]",
                "[BEGIN_AUDIO]",
                "[AUDIO]",
                "[TRANSCRIBE]",
            ]
            pieces = await transcript(llm, SpeechOrder(language="en"), 0.5, None)
            assert pieces[-1].segments
            with pytest.raises(ParamsError, match="does not translate"):
                await transcript(llm, SpeechOrder(translate=True), 0.5, None)

    asyncio.run(run())


@pytest.mark.skipif(not hasattr(transformers, "OmniASRProcessor"), reason="transformers 5.24 has it first")
def test_omniasr_is_asked_in_a_language_or_in_any(tmp_path: Path) -> None:
    """Its words are those of transformers' `apply_transcription_request`, whose codes are the family's."""
    from transformers.models.omniasr.processing_omniasr import ISO_639_1_TO_LANGUAGE

    recipe = census.RECIPES["omniasr"]
    spoken = ("<|lang:auto|>", "<|lang:deu_latn|>", "<s>")
    recipe = replace(recipe, tokens=(*recipe.tokens, *spoken), named={"bos_token": "<s>", "unk_token": "<|endoftext|>"})
    model, processor = census_media.make("omniasr", recipe, tmp_path)
    processor.chat_template = _OMNIASR_TEMPLATE
    wave = tiny.sound(0.9, 3)

    def theirs(language: str | None) -> str:
        inputs = processor.apply_transcription_request(wave, language=language, return_tensors="pt")
        made = model.generate(**inputs, max_new_tokens=8, do_sample=False)
        ids = [
            token for token in made[0, inputs["input_ids"].shape[1] :].tolist() if token != model.config.eos_token_id
        ]
        return str(processor.decode(ids, skip_special_tokens=True)).strip()

    async def run() -> None:
        options = {"dtype": "float32", "max_num_seqs": 4, "num_gpu_blocks_override": 64, "max_model_len": 512}
        async with AsyncLLM(str(tmp_path), **options) as llm:
            form, _ = llm.speech or (None, None)
            assert form is not None
            assert form.text(SpeechOrder(language="de")) == "<extra_id_1><extra_id_0><|lang:deu_latn|><s>"
            assert form.text(SpeechOrder()) == "<extra_id_1><extra_id_0><|lang:auto|><s>"
            shared = set(form.codes) & set(ISO_639_1_TO_LANGUAGE)
            assert {code: form.codes[code] for code in shared} == {code: ISO_639_1_TO_LANGUAGE[code] for code in shared}
            assert set(form.codes) - shared == {"jw"}
            answers = []
            for language in ("de", ""):
                order, params = SpeechOrder(language=language), SamplingParams(temperature=0, max_tokens=8)
                found = llm.transcribe((wave, tiny.SOUND_RATE), order, params)
                answers.append("".join([piece.text async for piece in found]).strip())
            assert answers == [theirs("de"), theirs(None)]
            assert answers[0] != answers[1]

    asyncio.run(run())


# What the published one writes of an audio and its language; "auto" stands for any.
_OMNIASR_TEMPLATE = (
    "{%- for part in messages[0]['content'] if part['type'] == 'audio' %}<extra_id_1>{% endfor -%}<extra_id_0>"
    "{%- set named = messages[0]['content'] | selectattr('type', 'equalto', 'language') | list -%}"
    "{{ '<|lang:' + (named[0]['language'] if named else 'auto') + '|>' }}<s>"
)
