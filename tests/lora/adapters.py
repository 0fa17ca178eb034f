"""Small random LoRA adapters of the tiny checkpoints, written by peft itself, and what peft answers with them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from tests.oracle import reference
from tests.oracle.cases import Ask
from tests.oracle.reference import Answer

# Below the decoder alone: CLIP's layers have a q_proj as well.
TEXT = r"(?:model\.)?(?:language_model\.|model\.)?layers\.\d+\.(?:self_attn|mlp)\.(?:{})"
ALL = "q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj"


@dataclass(frozen=True)
class Adapter:
    """How an adapter is made: `modules` is a pattern of layer names; `options` go to LoraConfig."""

    family: str
    seed: int
    rank: int = 4
    modules: str = ALL
    options: tuple[tuple[str, Any], ...] = field(default=())

    def config(self) -> LoraConfig:
        """peft's configuration."""
        options: dict[str, Any] = {"lora_alpha": 2 * self.rank} | dict(self.options)
        return LoraConfig(r=self.rank, target_modules=TEXT.format(self.modules), **options)


def wrapped(adapter: Adapter) -> Any:
    """peft's model: a copy of the family's, with the adapter's random matrices."""
    import copy

    model = get_peft_model(copy.deepcopy(reference.model(adapter.family)), adapter.config())
    generator = torch.Generator().manual_seed(adapter.seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".lora_" in name:
                weight.copy_(0.3 * torch.randn(weight.shape, generator=generator))
    return model.eval()


_MODELS: dict[Adapter, Any] = {}


def model(adapter: Adapter) -> Any:
    """The same, kept."""
    if adapter not in _MODELS:
        _MODELS[adapter] = wrapped(adapter)
    return _MODELS[adapter]


def write(adapter: Adapter, folder: Path) -> str:
    """Save it as peft does; gives the folder."""
    model(adapter).save_pretrained(str(folder))
    return str(folder)


def change(folder: str, tensors: Callable[[dict[str, Any]], dict[str, Any]] | None = None, **fields: Any) -> str:
    """Write other tensors, or other fields of the configuration, into an adapter's folder."""
    path = Path(folder)
    if tensors is not None:
        file = path / "adapter_model.safetensors"
        save_file({k: v.contiguous() for k, v in tensors(load_file(file)).items()}, file)
    config = json.loads((path / "adapter_config.json").read_text(encoding="utf-8"))
    (path / "adapter_config.json").write_text(json.dumps(config | fields), encoding="utf-8")
    return folder


@cache
def answer(adapter: Adapter | None, family: str, ask: Ask) -> Answer:
    """What transformers says with the adapter, or without."""
    if adapter is None:
        return reference.answer(family, ask)
    assert adapter.family == family
    return reference.answered(model(adapter), reference.inputs(family, ask), ask.max_tokens)


def answers(adapters: Sequence[Adapter | None], family: str, asks: Sequence[Ask]) -> list[Answer]:
    """One for each ask."""
    return [answer(adapter, family, ask) for adapter, ask in zip(adapters, asks, strict=True)]
