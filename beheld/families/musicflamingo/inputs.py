"""Music Flamingo: each window of an audio goes with its number, from which the tower computes times."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from beheld.families.inputs import FamilyInputs


def call(
    processor: Any, modality: str, item: Any, options: Mapping[str, Any], setting: str
) -> tuple[Mapping[str, Any], str]:
    """Run the processor on one audio item; see families.inputs.Call."""
    import torch

    outputs, (text,) = processor._process_audio([item], **options)
    return {**outputs, "windows": torch.arange(len(outputs["input_features"]))}, text


INPUTS = FamilyInputs(call=call)
