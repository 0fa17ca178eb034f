"""SpeechT5: a waveform, and the words that the transcript continues."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from beheld.checkpoint.files import CONFIG, read_json
from beheld.core.speech import SpeechForm
from beheld.families._shared.seeing.inputs import seen

_FIRST_ID = 2
# Kernels and strides of the convolutions, where config.json leaves them out.
_KERNELS, _STRIDES = (10, 3, 3, 3, 3, 2, 2), (5, 2, 2, 2, 2, 2, 2)


def first(folder: Path) -> int:
    """Return the token that starts every transcript."""
    return int(read_json(folder / CONFIG).get("decoder_start_token_id", _FIRST_ID))


def run(processor: Any, item: Any, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Run the feature extractor on one audio."""
    extractor = processor.feature_extractor
    made = extractor(audio=[item], **{**options, "return_tensors": "pt", "sampling_rate": extractor.sampling_rate})
    return {name: made[name] for name in ("input_values", "attention_mask") if name in made}


def states(outputs: Mapping[str, Any], folder: Path) -> int:
    """Return the number of states of a waveform; see FamilyInputs."""
    config, count = read_json(folder / CONFIG), int(outputs["input_values"].shape[-1])
    convolutions = zip(config.get("conv_kernel", _KERNELS), config.get("conv_stride", _STRIDES), strict=True)
    for kernel, stride in convolutions:
        count = (count - kernel) // stride + 1
    return count


INPUTS = seen(first, "audio", run, states=states, speech=SpeechForm("", written=True))
