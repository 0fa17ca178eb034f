"""transformers' own transcripts: its generate() with its rules, from a prompt of control tokens."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from transformers import GenerationConfig, WhisperForConditionalGeneration, WhisperProcessor
from transformers.generation import GenerationMixin
from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor

from tests import tiny
from tests.oracle.reference import Answer


@cache
def processor() -> Any:
    """The tiny checkpoint's processor."""
    return WhisperProcessor.from_pretrained(tiny.checkpoint("whisper"))


@cache
def model() -> Any:
    """The tiny checkpoint's model, in float32."""
    return WhisperForConditionalGeneration.from_pretrained(tiny.checkpoint("whisper"), dtype=torch.float32).eval()


def ids(text: str) -> list[int]:
    """The ids of a prompt as it is written."""
    found: list[int] = processor().tokenizer(text, add_special_tokens=False)["input_ids"]
    return found


def features(seconds: float, seed: int) -> Any:
    """What the encoder hears of a sound, as the processor makes it."""
    wave = tiny.sound(seconds, seed)
    return processor()(wave, sampling_rate=tiny.SOUND_RATE, return_tensors="pt")["input_features"]


@cache
def answer(sound: tuple[float, int], prompt: str, max_tokens: int, *, rules: str) -> Answer:
    """The greedy answer.

    Args:
        rules: "timestamps" with the rules for timestamps, "text" with the suppressed tokens alone, "none" without any
            but those on the first token.
    """
    options = GenerationConfig.from_pretrained(tiny.checkpoint("whisper"))
    options.update(max_length=None, max_new_tokens=max_tokens, do_sample=False, num_beams=1)
    options.update(output_logits=True, output_scores=True, return_dict_in_generate=True)
    prompt_ids = ids(prompt)
    if rules == "none":
        end = ids("<|endoftext|>")[0]
        options.suppress_tokens = [token for token in options.suppress_tokens if token < end]
    marked = GenerationConfig.from_pretrained(tiny.checkpoint("whisper"))
    stamps = [WhisperTimeStampLogitsProcessor(marked, begin_index=len(prompt_ids))] if rules == "timestamps" else []
    with torch.inference_mode():
        made = GenerationMixin.generate(
            model(),
            features(*sound),
            generation_config=options,
            decoder_input_ids=torch.tensor([prompt_ids]),
            logits_processor=stamps,
        )
    tokens = tuple(made.sequences[0].tolist()[len(prompt_ids) :])
    logits = torch.stack([step[0] for step in made.logits]).double()
    best = torch.stack([step[0] for step in made.scores]).topk(2, dim=-1).values
    logprobs = logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]
    return Answer(tuple(prompt_ids), tokens, tuple(logprobs.tolist()), tuple((best[:, 0] - best[:, 1]).tolist()))
