"""LoRA adapters that a checkpoint brings along, for requests with media of a kind."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from beheld.checkpoint.files import CONFIG, read_json
from beheld.checkpoint.weights import has_weights
from beheld.core.config import ModelInfo
from beheld.core.errors import ModelError
from beheld.core.request import LoRARequest
from beheld.families import registry


@dataclass(frozen=True)
class BuiltIn:
    """An adapter of the checkpoint's own, and its rank."""

    request: LoRARequest
    rank: int


def built_in(info: ModelInfo, modalities: Collection[str]) -> dict[str, BuiltIn]:
    """Modality -> adapter, of those of `modalities` that are there, most important first.

    Raises:
        ModelError: a configuration cannot be read, or the checkpoint's own names an adapter that is not there.
    """
    # Without weights there is nothing to miss: a model of random ones reads nothing.
    said = read_json(Path(info.path) / CONFIG) if has_weights(Path(info.path)) else {}
    found: dict[str, BuiltIn] = {}
    for number, (modality, folder) in enumerate(registry.facts(info.family).adapters, 1):
        if modality not in modalities:
            continue
        path = Path(info.path) / folder
        rank = read_json(path / "adapter_config.json").get("r")
        if rank is None and said.get(folder.replace("-", "_")):
            raise ModelError(
                f"config.json speaks of {folder}, with which the model reads media of the kind {modality}, but the "
                "checkpoint has no such folder.",
                f"Fetch {folder}/adapter_config.json and {folder}/adapter_model.safetensors as well.",
            )
        if isinstance(rank, int) and rank > 0:
            # As scripts of vLLM name them: "vision" is number 1.
            found[modality] = BuiltIn(LoRARequest(folder.removesuffix("-lora"), number, str(path)), rank)
    return found
