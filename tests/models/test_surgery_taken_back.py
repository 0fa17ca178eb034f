"""Every operation on a model can be taken back: its modules, methods, hooks and weights are as they were."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from beheld.core.config import EngineArgs
from beheld.engine.setup import resolve_and_decide
from beheld.models.hf import HFAdapter
from beheld.models.load import load_model
from beheld.models.surgery import compiled_parts, linears
from beheld.models.surgery.operation import Surgery
from beheld.models.surgery.operations import operations_of
from tests import tiny

# Families whose operations differ: plain, experts, further columns, a tail, windows of convolutions, states of media,
# packed images, two scales and recurrent states.
FAMILIES = (
    "llama", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v", "glm4v_moe", "gemma3n", "gemma4", "lfm2_vl", "llama4",
    "ernie4_5_vl_moe", "mllama", "florence2", "llava_next", "chameleon", "phi4_mm", "glm4v_moe_fp8",
    "qwen3_next",
)  # fmt: skip


def loaded(family: str, **options: Any) -> tuple[Surgery, Any]:
    args = EngineArgs(model=str(tiny.checkpoint(family)), device="cpu", **options)
    resolved = resolve_and_decide(args)
    return load_model(resolved.hf_config, resolved.info, resolved.config), resolved.info


def attributes(value: Any) -> Any:
    """Something that is equal as long as nobody has put another thing there."""
    return (value.data_ptr(), value.shape) if isinstance(value, torch.Tensor) else id(value)


def state(model: nn.Module) -> dict[str, Any]:
    """Of each module: its class, its own attributes, its hooks and what its parameters hold."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        own = {key: value for key, value in vars(module).items() if not key.startswith("_") and key != "training"}
        # Sizes are numbers; functions and other things are the same ones.
        kept = {k: v if isinstance(v, int | float | str | bool | tuple) else attributes(v) for k, v in own.items()}
        hooks = [len(module._forward_hooks), len(module._forward_pre_hooks)]
        found[name] = type(module), kept, hooks, list(module._parameters), list(module._modules)
    return found


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_all_is_as_it_was(family: str, dtype: str) -> None:
    surgery, info = loaded(family, dtype=dtype)
    model = surgery.target.model.eval()
    before = state(model)
    weights = {name: value.detach().clone() for name, value in model.named_parameters()}
    surgery.perform(operations_of(info))
    HFAdapter(surgery, info)
    names = [operation.name for operation, changes in surgery.done if len(changes)]
    assert len(names) >= 2
    # Rounding is not touched by any of it; what the adapter routes is transformers' own setting.
    assert state(model) != before
    assert list(surgery.done) == sorted(surgery.done, key=lambda each: each[0].phase)
    surgery.take_back()
    after = state(model)
    assert after.keys() == before.keys()
    for name, was in before.items():
        assert (after[name][0], after[name][2:]) == (was[0], was[2:]), name
        assert after[name][1].keys() == was[1].keys(), name
        changed = {key for key, value in was[1].items() if value != after[name][1][key]}
        assert not changed, (name, changed)
    found = dict(model.named_parameters())
    assert found.keys() == weights.keys()
    for name, value in weights.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("family", ["llama", "qwen2_5_vl"])
def test_operations_of_a_gpu_are_taken_back(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looked at where there is none: nothing is run."""
    surgery, info = loaded(family, dtype="bfloat16", enable_lora=True)
    model = surgery.target.model.eval()
    before, weights = state(model), {k: v.detach().clone() for k, v in model.named_parameters()}
    object.__setattr__(surgery.target.config, "device", "cuda")
    monkeypatch.setattr(compiled_parts, "layers_of_forms", lambda text, forms, trial, **more: {})
    surgery.perform(operations_of(info))
    names = {operation.name for operation, changes in surgery.done if len(changes)}
    assert {"fused linears", "single-row linears", "LoRA", "layer numbers", "compiled text"} <= names
    surgery.take_back()
    after = state(model)
    assert {n: (s[0], s[2:]) for n, s in after.items()} == {n: (s[0], s[2:]) for n, s in before.items()}
    assert {n: s[1].keys() for n, s in after.items()} == {n: s[1].keys() for n, s in before.items()}
    assert all(torch.equal(value, weights[name]) for name, value in model.named_parameters())
    assert not surgery.target.around


def test_a_padded_mlp_gets_its_size_back() -> None:
    from beheld.models.surgery.operation import Changes

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_proj, self.up_proj, self.down_proj = nn.Linear(8, 21), nn.Linear(8, 21), nn.Linear(21, 8)

    model, changes = nn.ModuleList([Gated()]), Changes()
    weights = {name: value.detach().clone() for name, value in model.named_parameters()}
    assert linears.pad_mlps(model, changes) == 1
    changes.take_back()
    assert model[0].gate_proj.out_features == model[0].down_proj.in_features == 21  # type: ignore[union-attr]
    assert all(torch.equal(value, weights[name]) for name, value in model.named_parameters())
