"""Voxtral: sounds in windows of thirty seconds, each filled up; a conversation in the form of Mistral's own tokenizer.

The checkpoint brings neither a chat template nor a processor for prompts with sound: both live in the library
mistral-common, which is not needed here: chat_templates/voxtral.jinja writes what that library writes (see
docs/log.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from beheld.checkpoint.files import read_json
from beheld.families.inputs import FamilyInputs

_RATE = 12.5
# The processor's own defaults, which older versions of transformers keep where only its own methods find them.
_WINDOWS = {"padding": True, "truncation": False, "pad_to_multiple_of": 480000, "max_source_positions": 3000}


def call(
    processor: Any, modality: str, item: Any, options: Mapping[str, Any], setting: str
) -> tuple[Mapping[str, Any], str]:
    """Run the processor on one sound; see families.inputs.Call."""
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


INPUTS = FamilyInputs(placeholders={"audio": "[BEGIN_AUDIO][AUDIO]"}, template="voxtral/chat_template.jinja", call=call)
