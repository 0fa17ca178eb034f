"""Encoders of speech before decoders of text: a waveform, and the words that the answer continues."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from beheld.core.speech import SpeechForm
from beheld.families._shared.seeing.inputs import seen
from beheld.families.vision_encoder_decoder import first_token


@cache
def _config(folder: Path) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(str(folder))


def run(processor: Any, item: Any, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Run the feature extractor on one audio."""
    extractor = processor.feature_extractor
    made = extractor([item], **{**options, "return_tensors": "pt", "sampling_rate": extractor.sampling_rate})
    return {name: made[name] for name in ("input_values", "attention_mask") if name in made}


def states(outputs: Mapping[str, Any], folder: Path) -> int:
    """Return the number of states of a waveform, after the convolutions and the adapter; see FamilyInputs."""
    encoder = _config(folder).encoder
    count = int(outputs["input_values"].shape[-1])
    for kernel, stride in zip(encoder.conv_kernel, encoder.conv_stride, strict=True):
        count = (count - kernel) // stride + 1
    for _ in range(encoder.num_adapter_layers if getattr(encoder, "add_adapter", False) else 0):
        count = (count - 1) // encoder.adapter_stride + 1
    return count


INPUTS = seen(
    lambda folder: first_token(_config(folder)),
    "audio",
    run,
    states=states,
    speech=SpeechForm("", written=True),
)
