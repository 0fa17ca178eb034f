"""Moonshine: a waveform is heard as it is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from beheld.core.speech import SpeechForm
from beheld.families._shared.hearing.inputs import heard

# Kernel and stride of the three convolutions.
_CONVOLUTIONS = ((127, 64), (7, 3), (3, 2))
# The cards bound transcripts by this, against "hallucination loops"; people speak fewer tokens in a second.
MOST_PER_S = 6.5


def states(outputs: Mapping[str, Any], folder: Path) -> int:
    """Return the number of states of a waveform; see FamilyInputs."""
    count = int(outputs["input_values"].shape[-1])
    for kernel, stride in _CONVOLUTIONS:
        count = (count - kernel) // stride + 1
    return count


INPUTS = heard("<s>", ("input_values",), states, SpeechForm("<s>", written=True, most_per_s=MOST_PER_S))
