"""Speech2Text: its features need no padding where an audio is heard alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from beheld.checkpoint.files import CONFIG, read_json
from beheld.core.speech import SpeechForm
from beheld.families._shared.hearing.inputs import heard


def states(outputs: Mapping[str, Any], folder: Path) -> int:
    """Return the number of states of features, which each convolution halves; see FamilyInputs."""
    count = int(outputs["input_features"].shape[1])
    for _ in range(int(read_json(folder / CONFIG).get("num_conv_layers", 2))):
        count = (count - 1) // 2 + 1
    return count


INPUTS = heard("</s>", ("input_features",), states, SpeechForm("</s>", written=True))
