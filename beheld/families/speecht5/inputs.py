"""SpeechT5: a waveform is heard as it is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from beheld.checkpoint.files import CONFIG, read_json
from beheld.core.speech import SpeechForm
from beheld.families._shared.hearing.config import states_of
from beheld.families._shared.hearing.inputs import heard


def states(outputs: Mapping[str, Any], folder: Path) -> int:
    """Return the number of states of a waveform; see FamilyInputs."""
    return states_of(read_json(folder / CONFIG), int(outputs["input_values"].shape[-1]))


INPUTS = heard("</s>", ("input_values",), states, SpeechForm("</s>", written=True))
