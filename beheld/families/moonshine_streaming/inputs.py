"""Moonshine Streaming: a waveform in frames of five milliseconds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from beheld.checkpoint.files import CONFIG, read_json
from beheld.core.speech import SpeechForm
from beheld.families._shared.hearing.inputs import heard
from beheld.families.moonshine.inputs import MOST_PER_S


def states(outputs: Mapping[str, Any], folder: Path) -> int:
    """Return the number of states of a waveform, whose frames are halved twice; see FamilyInputs."""
    config = read_json(folder / CONFIG).get("encoder_config") or {}
    frame = round(float(config.get("sample_rate", 16000)) * float(config.get("frame_ms", 5.0)) / 1000)
    count = int(outputs["input_values"].shape[-1]) // frame
    for _ in range(2):
        count = (count - 1) // 2 + 1
    return count


INPUTS = heard(
    "<s>", ("input_values", "attention_mask"), states, SpeechForm("<s>", written=True, most_per_s=MOST_PER_S)
)
