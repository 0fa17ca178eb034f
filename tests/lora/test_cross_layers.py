"""Layers that attend to an encoder's states carry no adapters, whatever a family calls them."""

from __future__ import annotations

from typing import Any

from torch import nn

from beheld.core.config import EngineArgs
from beheld.engine.setup import resolve_and_decide
from beheld.lora.layers import LoRALinear
from beheld.models.cross import CrossAttention
from beheld.models.load import load_model
from beheld.models.surgery.lora_attach import attach
from beheld.models.surgery.operation import Changes
from beheld.models.surgery.parts import text_model
from tests import tiny


def test_layers_that_see_other_rows_than_the_step_carry_no_adapter() -> None:
    """Pix2Struct's and T5's names; keys and values are of an encoder's states, of which no adapter is chosen."""
    names = ("q", "k", "v", "o")
    linears: dict[str, tuple[str, nn.Module]] = {name: (name, nn.Linear(16, 16)) for name in names}
    decided = resolve_and_decide(
        EngineArgs(model=str(tiny.checkpoint("qwen2")), device="cpu", dtype="float32", enable_lora=True)
    )
    model = load_model(decided.hf_config, decided.info, decided.config).target.model
    layer: Any = text_model(model).layers[0]
    layer.EncDecAttention = CrossAttention(0, linears, {}, 16, 1.0)
    attach(model, text_model(model), decided.config, Changes())
    assert isinstance(layer.self_attn.o_proj, LoRALinear)
    assert not any(isinstance(module, LoRALinear) for module in layer.EncDecAttention.modules())
