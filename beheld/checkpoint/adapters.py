"""LoRA adapters that a checkpoint brings along, for requests with media of a kind."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from beheld.checkpoint.resolve import read_json
from beheld.core.config import ModelInfo
from beheld.core.request import LoRARequest

# Model type -> (modality, folder) in the order in which they go first: with pictures and sound, that of pictures.
_FOLDERS = {"phi4_multimodal": (("image", "vision-lora"), ("audio", "speech-lora"))}


@dataclass(frozen=True)
class BuiltIn:
    """An adapter of the checkpoint's own, and its rank."""

    request: LoRARequest
    rank: int


def built_in(info: ModelInfo) -> dict[str, BuiltIn]:
    """Modality -> adapter, of those that are there and that this model can use, most important first.

    Raises:
        ModelError: a configuration cannot be read.
    """
    found: dict[str, BuiltIn] = {}
    for number, (modality, folder) in enumerate(_FOLDERS.get(info.model_type, ()), 1):
        path = Path(info.path) / folder
        rank = read_json(path / "adapter_config.json").get("r")
        if modality in info.modalities and isinstance(rank, int) and rank > 0:
            # As scripts of vLLM name them: "vision" is number 1.
            found[modality] = BuiltIn(LoRARequest(folder.removesuffix("-lora"), number, str(path)), rank)
    return found
