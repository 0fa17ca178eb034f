"""Voxtral: audio in padded windows of thirty seconds; conversations in the form of Mistral's tokenizer.

The checkpoint has neither a chat template nor a processor for prompts with audio: both are in the library
mistral-common, which is not needed: chat_template.jinja writes what that library writes (see
docs/experiments/2026-11.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from beheld.checkpoint.files import read_json
from beheld.core.speech import SpeechForm
from beheld.families.inputs import FamilyInputs

_RATE = 12.5
# The processor's defaults, which older versions of transformers keep where only its methods find them.
_WINDOWS = {"padding": True, "truncation": False, "pad_to_multiple_of": 480000, "max_source_positions": 3000}


def call(
    processor: Any, modality: str, item: Any, options: Mapping[str, Any], setting: str
) -> tuple[Mapping[str, Any], str]:
    """Run the processor on one audio item; see families.inputs.Call."""
    extractor = processor.feature_extractor
    own = {**_WINDOWS, "sampling_rate": extractor.sampling_rate, **options}
    frames = int(own.pop("max_source_positions"))
    features = processor._retrieve_input_features([item], frames, **own)
    seconds = features.shape[0] * frames * extractor.hop_length / extractor.sampling_rate
    count = round(seconds * _embeds_per_second(processor.tokenizer.name_or_path))
    return {"input_features": features}, processor.audio_token * count


@cache
def _embeds_per_second(folder: str) -> float:
    stated = read_json(Path(folder) / "tekken.json").get("audio")
    return float(stated.get("frame_rate", _RATE)) if isinstance(stated, Mapping) else _RATE


def join_audio(processor: Any, text: str, waves: Sequence[Any]) -> dict[str, Any]:
    """Join text and audio, for which the processor would need mistral-common; see FamilyInputs."""
    import torch
    from transformers import AutoConfig

    tower = AutoConfig.from_pretrained(processor.tokenizer.name_or_path).audio_config
    options = {
        "sampling_rate": processor.feature_extractor.sampling_rate,
        "padding": True,
        "truncation": False,
        "pad_to_multiple_of": _WINDOWS["pad_to_multiple_of"],
        "return_tensors": "pt",
    }
    features = [
        processor._retrieve_input_features([wave], _WINDOWS["max_source_positions"], **options) for wave in waves
    ]
    embeds = tower.max_source_positions * tower.hidden_size // tower.intermediate_size
    first, *rest = text.split(processor.audio_token)
    filled = [processor.audio_token * (embeds * len(made)) + part for made, part in zip(features, rest, strict=True)]
    made = {"input_ids": processor.tokenizer(first + "".join(filled), return_tensors="pt")["input_ids"]}
    return made | ({"input_features": torch.cat(features)} if features else {})


INPUTS = FamilyInputs(
    placeholders={"audio": "[BEGIN_AUDIO][AUDIO]"},
    template="voxtral/chat_template.jinja",
    call=call,
    join_audio=join_audio,
    speech=SpeechForm("<s>[INST][BEGIN_AUDIO][AUDIO][/INST]{lang:code}[TRANSCRIBE]", "", written=True),
)
