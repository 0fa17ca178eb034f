"""Memory for weights that comes while a model's class is imported."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from beheld.checkpoint.checks.safetensors import count_numbers
from beheld.core.config import EngineArgs
from beheld.engine.setup import resolve_and_decide
from beheld.models import load, memory_ahead
from beheld.models.surgery.vector_linear import can_multiply
from beheld.platform.registry import CPU
from tests import tiny

needs_products = pytest.mark.skipif(not can_multiply(), reason="needs a CPU with bfloat16 in hardware, and llvmlite")


def bytes_of(family: str, **changes: Any) -> int:
    decided = resolve_and_decide(EngineArgs(str(tiny.checkpoint(family)), device="cpu", dtype="bfloat16"))
    config = dataclasses.replace(decided.config, **changes)
    return memory_ahead._packed_bytes(decided.hf_config, decided.info, config)


@needs_products
def test_what_is_brought_in_is_what_is_packed_and_a_little_more() -> None:
    decided = resolve_and_decide(EngineArgs(str(tiny.checkpoint("qwen2_5_vl")), device="cpu", dtype="bfloat16"))
    model = load.load_model(decided.hf_config, decided.info, decided.config).target.model
    linears = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    packed = 2 * sum(linear.weight.numel() for linear in linears)
    assert packed <= memory_ahead._packed_bytes(decided.hf_config, decided.info, decided.config) < 1.5 * packed


@needs_products
@pytest.mark.parametrize("changes", [{"dtype": "float32"}, {"quantization": "int8"}, {"load_format": "dummy"}])
def test_other_forms_of_weights_get_none(changes: dict[str, Any]) -> None:
    assert bytes_of("qwen2_5_vl") > 0
    assert bytes_of("qwen2_5_vl", **changes) == 0


@needs_products
def test_none_comes_where_loading_would_take_all_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = bytes_of("qwen2_5_vl")
    platform = memory_ahead.platform_of("cpu")
    short = SimpleNamespace(shares_host_memory=True, bfloat16_products=True, memory=lambda: (2 * wanted - 1, 1 << 40))
    assert platform is CPU
    monkeypatch.setattr(memory_ahead, "platform_of", lambda _: short)
    assert bytes_of("qwen2_5_vl") == 0


@needs_products
def test_embeddings_that_are_not_packed_have_room_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a start would find less free than its weights take, and warn of a model that fits."""
    packed = bytes_of("llama")
    whole = 2 * count_numbers(tiny.checkpoint("llama"))
    assert packed < whole
    for free, expected in ((packed + whole - 1, 0), (packed + whole, packed)):
        short = SimpleNamespace(shares_host_memory=True, bfloat16_products=True, memory=lambda free=free: (free, free))
        monkeypatch.setattr(memory_ahead, "platform_of", lambda _, short=short: short)
        assert bytes_of("llama") == expected
