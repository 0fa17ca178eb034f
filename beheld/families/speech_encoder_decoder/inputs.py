"""Wav2Vec 2 before a decoder: a waveform is heard as it is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from beheld.checkpoint.files import CONFIG, read_json
from beheld.core.speech import SpeechForm
from beheld.families._shared.hearing.config import states_of
from beheld.families._shared.hearing.inputs import heard
from beheld.families._shared.joined.inputs import start_token
from beheld.families.inputs import FamilyInputs


def states(outputs: Mapping[str, Any], folder: Path) -> int:
    """Return the number of states of a waveform; see FamilyInputs."""
    return states_of(read_json(folder / CONFIG)["encoder"], int(outputs["input_values"].shape[-1]))


def _of(folder: Path) -> FamilyInputs:
    start = start_token(folder)
    return heard(start, ("input_values",), states, SpeechForm(start, written=True))


INPUTS = FamilyInputs(variant=_of)
