"""Qwen3-ASR: how it is asked for transcripts."""

from __future__ import annotations

from beheld.core.speech import SpeechForm
from beheld.families.inputs import FamilyInputs

_PROMPT = (
    "<|im_start|>system\n{prompt}<|im_end|>\n"
    "<|im_start|>user\n<|audio_start|><|audio_pad|><|audio_end|><|im_end|>\n"
    "<|im_start|>assistant\n{name:language }"
)

INPUTS = FamilyInputs(
    placeholders={"audio": "<|audio_start|><|audio_pad|><|audio_end|>"},
    # Without a language it writes one: language English<asr_text> and the words.
    speech=SpeechForm(_PROMPT, written=True, marker="<asr_text>"),
)
