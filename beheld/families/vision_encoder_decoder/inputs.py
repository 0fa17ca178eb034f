"""Donut, Nougat and TrOCR: one image, and a prompt that begins the answer, in some of them with a task's token."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from beheld.checkpoint.files import CONFIG, read_json
from beheld.families._shared.joined.inputs import start_token
from beheld.families._shared.one_image.inputs import pixels, seen
from beheld.families.inputs import FamilyInputs
from beheld.families.vision_encoder_decoder import states_of


def states(outputs: Mapping[str, Any], folder: Path) -> int:
    """Return the number of states of an image; see FamilyInputs."""
    return states_of(read_json(folder / CONFIG)["encoder"], *outputs["pixel_values"].shape[-2:])


INPUTS = FamilyInputs(variant=lambda folder: seen(start_token(folder), pixels, states))
