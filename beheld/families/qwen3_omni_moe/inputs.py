"""Qwen3-Omni: like Qwen2.5-Omni with other placeholders; its audio is not padded."""

from __future__ import annotations

from dataclasses import replace

from beheld.core.speech import SpeechForm
from beheld.families.qwen2_5_omni import inputs as qwen2_5_omni
from beheld.families.qwen3_vl import inputs as qwen3_vl

INPUTS = replace(
    qwen2_5_omni.INPUTS,
    placeholders={
        "image": "<|vision_start|><|image_pad|><|vision_end|>",
        "video": "<|vision_start|><|video_pad|><|vision_end|>",
        "audio": "<|audio_start|><|audio_pad|><|audio_end|>",
    },
    embedded=qwen3_vl.INPUTS.embedded,
    speech=SpeechForm("Transcribe the audio{language} into text.", "Translate the audio{language} into English text."),
)
