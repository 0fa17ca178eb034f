"""Kyutai's speech to text: an audio as samples, and the token before its first one."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from beheld.core.speech import SpeechForm
from beheld.families._shared.seeing.inputs import seen


@cache
def _config(folder: Path) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(str(folder))


def states(outputs: Mapping[str, Any], folder: Path) -> int:
    """Return the number of states: one for the first token, and one for each frame; see FamilyInputs."""
    return 1 + int(outputs["sample_bits"].shape[-1]) // int(_config(folder).frame_size)


def run(processor: Any, item: Any, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Run the feature extractor on one audio, which adds silence around it.

    The codec computes in float32 whatever the model's type is, so samples travel as their bits.
    """
    import torch

    extractor = processor.feature_extractor
    made = extractor([item], **{**options, "return_tensors": "pt", "sampling_rate": extractor.sampling_rate})
    return {"sample_bits": made["input_values"].to(torch.float32).view(torch.int32)}


INPUTS = seen(
    lambda folder: int(_config(folder).bos_token_id),
    "audio",
    run,
    states=states,
    answer_within_states=True,
    speech=SpeechForm("", written=True),
)
