"""SpeechT5: a waveform is heard as it is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from beheld.checkpoint.files import CONFIG, read_json
from beheld.core.speech import SpeechForm
from beheld.families._shared.hearing.inputs import heard
from beheld.families.speecht5 import convolved

_KERNELS, _STRIDES = (10, 3, 3, 3, 3, 2, 2), (5, 2, 2, 2, 2, 2, 2)


def states(outputs: Mapping[str, Any], folder: Path) -> int:
    """Return the number of states of a waveform; see FamilyInputs."""
    config = read_json(folder / CONFIG)
    kernels, strides = config.get("conv_kernel", _KERNELS), config.get("conv_stride", _STRIDES)
    return convolved(int(outputs["input_values"].shape[-1]), kernels, strides)


INPUTS = heard("</s>", ("input_values",), states, SpeechForm("</s>", written=True))
