"""Weights that are rounded on a device which cannot hold them unrounded: how much of its memory is taken at most."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from beheld.core.config import EngineArgs
from beheld.engine.setup import resolve_and_decide
from beheld.models.load import load_model
from beheld.platform.cpu import Cpu
from beheld.quant import registry
from beheld.quant.at_load import RoundedAtLoad
from beheld.quant.float8_at_load import Float8Rounding
from beheld.quant.int4 import Int4Rounding
from beheld.quant.int8 import Int8GPURounding
from beheld.quant.linear import StoredLinear
from beheld.quant.method import StorageTarget
from tests import tiny

LAYERS = 12


class Device(TorchDispatchMode):
    """A stand-in for a GPU's memory: what modules are moved to, and all that is made since the first of them moved."""

    def __init__(self) -> None:
        super().__init__()
        self._held: dict[StorageWeakRef, int] = {}
        self.most_bytes, self.begun = 0, False
        # At each move: what it holds before, and the most that it held until then.
        self.moves: list[tuple[int, int]] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = function(*args, **(kwargs or {}))
        if self.begun:
            given = {each.untyped_storage()._cdata for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
            for each in tree_leaves(made):
                if isinstance(each, Tensor) and not each.is_meta and each.untyped_storage()._cdata not in given:
                    self._held[StorageWeakRef(each.untyped_storage())] = each.untyped_storage().nbytes()
        self.held_bytes()
        return made

    def held_bytes(self) -> int:
        """What it holds now."""
        self._held = {storage: size for storage, size in self._held.items() if not storage.expired()}
        self.most_bytes = max(self.most_bytes, sum(self._held.values()))
        return sum(self._held.values())

    def to(self, module: nn.Module, device: str) -> nn.Module:
        """In place of `nn.Module.to`."""
        self.begun = True
        self.moves.append((self.held_bytes(), self.most_bytes))

        def moved(tensor: Tensor) -> Tensor:
            return tensor if StorageWeakRef(tensor.untyped_storage()) in self._held else tensor.clone()

        return module._apply(moved)


def make_fp8(stated: Mapping[str, Any], target: StorageTarget) -> RoundedAtLoad:
    return RoundedAtLoad(Float8Rounding(), target.dtype, target.device)


def make_int4(stated: Mapping[str, Any], target: StorageTarget) -> RoundedAtLoad:
    return RoundedAtLoad(Int4Rounding(on_gpu=True), target.dtype, target.device)


def make_int8(stated: Mapping[str, Any], target: StorageTarget) -> RoundedAtLoad:
    return RoundedAtLoad(Int8GPURounding(), target.dtype, target.device)


def deep(settings: dict[str, Any]) -> dict[str, Any]:
    text = settings.get("text_config", settings)
    text |= {"num_hidden_layers": LAYERS, "layer_types": ["full_attention"] * LAYERS}
    return settings


def decided(path: Path, quantization: str | None = None) -> tuple[Any, Any, Any]:
    args = EngineArgs(model=str(path), device="cpu", dtype="float32", quantization=quantization)
    made = resolve_and_decide(args)
    return made.hf_config, made.info, made.config


@pytest.mark.parametrize("way", ["fp8", "int4", "int8"])
def test_a_device_never_holds_two_layers_as_they_were(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(registry.AT_LOAD, way, f"{__name__}:make_{way}")
    path = tiny.reshaped("llama", tmp_path / "deep", deep)
    was = load_model(*decided(path)).target.model
    unrounded = sum(parameter.nbytes for parameter in was.parameters())
    layers = [each.weight.nbytes for each in was.model.layers.modules() if isinstance(each, nn.Linear)]
    wanted = decided(path, way)
    at_once = load_model(*wanted).target.model.state_dict()
    device = Device()
    monkeypatch.setattr(nn.Module, "to", lambda module, to: device.to(module, to))
    monkeypatch.setattr(Cpu, "shares_host_memory", False)
    monkeypatch.setattr(Cpu, "memory", lambda self: (unrounded, unrounded))
    with device:
        streamed = load_model(*wanted).target.model
    assert sum(isinstance(module, StoredLinear) for module in streamed.modules()) == 7 * LAYERS
    held = sum(parameter.nbytes for parameter in streamed.parameters())
    assert held <= device.held_bytes() < 1.1 * held
    assert device.most_bytes < held + max(layers)
    # The last move is of all that is not rounded. Before it, one layer is there as it was, and what rounds it.
    assert len(device.moves) == len(layers) + 1
    rounded, most = device.moves[-1]
    assert most < rounded + 5 * max(layers) < sum(layers)
    found = streamed.state_dict()
    assert found.keys() == at_once.keys()
    assert all(torch.equal(value, found[name]) for name, value in at_once.items())
