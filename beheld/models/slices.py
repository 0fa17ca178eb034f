"""Weights of several checkpoints as one state dict, each read when transformers' loader takes it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from beheld.checkpoint.weights import weight_files
from beheld.core.config import SecondaryWeights
from beheld.core.errors import ModelError


def joined_slices(path: Path, secondary: Sequence[SecondaryWeights]) -> dict[str, Any]:
    """Return name -> weight, unread, of a checkpoint and its secondary ones; indexing one with `...` reads it.

    Its own weights go before those of the same name in a secondary checkpoint.

    Raises:
        ModelError: the weights of one are not stored as safetensors.
    """
    found: dict[str, Any] = {}
    for part in secondary:
        weights = _slices(Path(part.path)).items()
        root = part.root
        found |= {part.prefix + name.removeprefix(root): weight for name, weight in weights if name.startswith(root)}
    return found | _slices(path)


def _slices(path: Path) -> dict[str, Any]:
    from safetensors import safe_open

    found: dict[str, Any] = {}
    for name in weight_files(path):
        if not name.endswith(".safetensors"):
            raise ModelError(
                f"{name} is not a safetensors file; a model of several checkpoints is read from such files alone.",
                "Fetch a revision of this checkpoint with safetensors.",
            )
        opened = safe_open(path / name, framework="pt", device="cpu")
        found |= {key: opened.get_slice(key) for key in opened.keys()}  # noqa: SIM118 (it is no mapping)
    return found
