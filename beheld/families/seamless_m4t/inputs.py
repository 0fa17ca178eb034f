"""SeamlessM4T: the decoder's start, then the language of the answer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from beheld.checkpoint.files import CONFIG, read_json
from beheld.families._shared.hearing.inputs import heard


def states(outputs: Mapping[str, Any], folder: Path) -> int:
    """Return the number of states of an audio's frames, after the adapter's convolutions; see FamilyInputs."""
    config = read_json(folder / CONFIG)
    kernel, stride = int(config.get("adaptor_kernel_size", 8)), int(config.get("adaptor_stride", 8))
    count = int(outputs["input_features"].shape[1])
    seen = int(outputs["attention_mask"].sum()) if "attention_mask" in outputs else count
    if not config.get("add_adapter", True):
        return seen
    # What the decoder sees is counted with another padding than the convolutions have.
    made = (count + 2 * (stride // 2) - kernel) // stride + 1
    return min(made, (seen + 2 * (kernel // 2) - kernel) // stride + 1)


INPUTS = heard("</s>", ("input_features", "attention_mask"), states, None)
