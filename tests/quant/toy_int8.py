"""A method of one file: int8 numbers with a scale for each row, multiplied as they are stored.

It shows the protocol in small: nothing outside this file knows of it but the registry's list.

Shapes: N outputs, K inputs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from beheld.core.errors import ModelError
from beheld.parallel.shards import Cut
from beheld.quant import row_bytes
from beheld.quant.dequantize import AS_STORED, are_kept, without_quantization
from beheld.quant.linear import StoredLinear, bias_of, joined_bias
from beheld.quant.method import Replace, StorageTarget, TextOf
from beheld.quant.row_bytes import LoadedRows
from beheld.quant.stored_as import Axis, StoredAs

NAME = "toy-int8"


class ToyLinear(StoredLinear):
    """y = (x q^T) s, with q in int8 and one s for each output."""

    def __init__(self, rows_NK: Tensor, scale_N1: Tensor, bias_N: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__(rows_NK.shape, bias_N, dtype, rows_NK.device)
        self.rows_NK = nn.Parameter(rows_NK, requires_grad=False)
        self.scale_N1 = nn.Parameter(scale_N1, requires_grad=False)

    @classmethod
    def joined(cls, layers: Sequence[ToyLinear]) -> ToyLinear:
        rows, scales = ([getattr(layer, name).data for layer in layers] for name in ("rows_NK", "scale_N1"))
        return cls(torch.cat(rows), torch.cat(scales), joined_bias(layers), layers[0].weight.dtype)

    def part(self, outputs: slice) -> ToyLinear:
        rows_NK, scale_N1 = self.rows_NK.data[outputs], self.scale_N1.data[outputs]
        return ToyLinear(rows_NK, scale_N1, bias_of(self, outputs), self.weight.dtype)

    def dequantized(self) -> Tensor:
        return self.rows_NK.data.float() * self.scale_N1.data

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.linear(x, self.rows_NK.to(x.dtype)) * self.scale_N1.squeeze(1).to(x.dtype)
        return y if self.bias is None else y + self.bias


class ToyWeight:
    """A weight of the file; see row_bytes.StoredWeight."""

    def __init__(self, rows: Any, scale: Any) -> None:
        self._rows, self._scale = rows, scale

    def __getitem__(self, index: Any) -> Tensor:
        whole: Tensor = self._rows[...].float() * self._scale[...]
        return whole[index]

    def fields(self) -> Sequence[Tensor]:
        return self._rows[...], self._scale[...]

    def rank_part(self, cut: Cut) -> ToyWeight | None:
        shape = self._rows.get_shape()
        stored = StoredAs((shape[0], shape[1]), {"rows": (Axis(0), Axis(1)), "scale": (Axis(0), None)})
        parts = stored.entries_of({"rows": self._rows, "scale": self._scale}, cut)
        return None if parts is None else ToyWeight(parts["rows"], parts["scale"])


class ToyInt8:
    """See QuantMethod, and row_bytes.RowForm."""

    name = NAME
    converted = "its int8 weights dequantized"

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def config(self, hf_config: Any) -> Any:
        return without_quantization(hf_config)

    def weights(self, path: Path) -> dict[str, Any] | None:
        opened = safe_open(path / "model.safetensors", framework="pt", device="cpu")
        parts = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 (it is no mapping)
        names = [name for name in parts if not name.endswith("_scale")]
        for name in names:
            if parts[name].get_dtype() == "I8" and f"{name}_scale" not in parts:
                raise ModelError(f"The weight {name!r} has no scale.", "Fetch the checkpoint again.")
        return {n: ToyWeight(parts[n], parts[f"{n}_scale"]) if f"{n}_scale" in parts else parts[n] for n in names}

    def loading(self, model_class: Any, weights: dict[str, Any]) -> Any:
        return row_bytes.keeping(model_class, weights, self)

    def kept_as(self, parameter: Tensor, weights: Sequence[Any]) -> str | None:
        return AS_STORED if are_kept(self.takes, parameter, weights) else None

    def settle(self, model: Any, model_class: Any, text_of: TextOf, replace: Replace) -> None:
        row_bytes.settle(model, model_class, self, replace)

    def stored_bytes(
        self, path: Path, model: Any, text_of: TextOf, weights: Mapping[str, Any] | None = None
    ) -> int | None:
        return (path / "model.safetensors").stat().st_size

    def layout(self, weight: Any, inputs: int) -> Sequence[tuple[torch.dtype, int]]:
        return (torch.int8, inputs), (torch.float32, 1)

    def takes(self, parameter: Tensor, weights: Sequence[Any]) -> bool:
        return parameter.dim() == 2

    def linear(self, rows: LoadedRows, bias_N: Tensor | None) -> StoredLinear:
        return ToyLinear(rows.fields[0], rows.fields[1], bias_N, self._dtype)

    def experts(self, shell: nn.Module, gate_up: LoadedRows, down: LoadedRows) -> Any:
        raise AssertionError("it takes no experts")


def make(stated: Mapping[str, Any], target: StorageTarget) -> ToyInt8:
    """The method of a checkpoint."""
    if stated.get("bits") != 8:
        raise ModelError(f"Weights of {NAME} with {stated.get('bits')} bits are not built.", "Use 8.")
    return ToyInt8(target.dtype)


def quantize(source: Path, target: Path) -> None:
    """Write the checkpoint in `source` so, and what its weights mean into `target`/plain."""
    (target / "plain").mkdir(parents=True)
    for file in source.iterdir():
        if file.is_file() and file.suffix != ".safetensors":
            for folder in (target, target / "plain"):
                (folder / file.name).write_bytes(file.read_bytes())
    stored, meant = {}, {}
    for name, weight in load_file(source / "model.safetensors").items():
        meant[name] = stored[name] = weight
        if weight.dim() == 2 and "layers" in name:
            scale = (weight.float().abs().amax(1, keepdim=True) / 127).clamp(min=1e-8)
            rows = (weight.float() / scale).round().to(torch.int8)
            stored |= {name: rows, f"{name}_scale": scale}
            meant[name] = rows.float() * scale
    save_file(stored, target / "model.safetensors", metadata={"format": "pt"})
    save_file(meant, target / "plain" / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {"quant_method": NAME, "bits": 8}
    (target / "config.json").write_text(json.dumps(config), encoding="utf-8")
