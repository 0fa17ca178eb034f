"""Qwen3-Omni: like Qwen2.5-Omni with other placeholders; its audio is not padded."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import groupby
from typing import Any

from beheld.core.speech import SpeechForm
from beheld.families.qwen2_5_omni import inputs as qwen2_5_omni
from beheld.families.qwen3_vl import inputs as qwen3_vl


def interleave(
    processor: Any, video: Mapping[str, tuple[Any, ...]], num_audio: int
) -> tuple[str, Mapping[str, tuple[Any, ...]]]:
    """Return the text of a video with its audio: each step of frames goes before the audio from its time on."""
    video_token, audio_token = processor.video_token, processor.audio_token
    text, heard = "", 0
    steps = groupby(qwen2_5_omni.frame_positions(processor, video, processor.position_id_per_seconds))
    for position, tokens in steps:
        before = min(num_audio, math.ceil(position))
        text += audio_token * (before - heard) + video_token * sum(1 for _ in tokens)
        heard = before
    return qwen2_5_omni.around(processor, text + audio_token * (num_audio - heard))


INPUTS = replace(
    qwen2_5_omni.INPUTS,
    placeholders={
        "image": "<|vision_start|><|image_pad|><|vision_end|>",
        "video": "<|vision_start|><|video_pad|><|vision_end|>",
        "audio": "<|audio_start|><|audio_pad|><|audio_end|>",
    },
    interleave=interleave,
    embedded=dict.fromkeys(("image", "video"), qwen3_vl.DEEPER),
    speech=SpeechForm("Transcribe the audio{language} into text.", "Translate the audio{language} into English text."),
)
