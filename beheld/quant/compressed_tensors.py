"""FP8 checkpoints in the compressed-tensors format, multiplied as stored or dequantized while loading.

Each quantized weight has a scale: one number per output channel, or one for the whole weight. A device that multiplies
FP8 keeps the weights (row_bytes.py, float8.py). Elsewhere a weight is multiplied by its scale when transformers' loader
reads it, before the loader merges or renames anything, so scales need no renaming.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from beheld.core.errors import ModelError
from beheld.platform.registry import platform_of
from beheld.quant import row_bytes
from beheld.quant.float8 import ALIGNED, FP8, Float8Experts, Float8Linear
from beheld.quant.linear import StoredExperts, StoredLinear
from beheld.quant.method import Replace, TextOf
from beheld.utils import env
from beheld.utils.log import get_logger

logger = get_logger(__name__)

METHOD = "compressed-tensors"
FORMAT = "float-quantized"
_FP8 = "F8_E4M3"
_SCALE = "_scale"
_ACTIVATION_SCALE = ".input_scale"
_STRATEGIES = ("channel", "tensor")
_INDEX = "model.safetensors.index.json"
_REMEDY = f"Use the unquantized checkpoint, or one of {METHOD!r} in the format {FORMAT!r} (FP8)."


def make(stated: Mapping[str, Any], device: str, dtype: torch.dtype) -> CompressedTensors:
    """Return the method for a checkpoint's quantization_config, `stated`; see quant/method.py."""
    check(stated)
    return CompressedTensors(stated, device, dtype)


class CompressedTensors:
    """See QuantMethod.

    Attributes:
        objection: why weights are not kept as stored, in words; None if they are kept.
    """

    name = METHOD
    converted = "its FP8 weights dequantized"

    def __init__(self, stated: Mapping[str, Any], device: str, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype
        self.objection = objection(stated, device, dtype)

    def config(self, hf_config: Any) -> Any:
        """Return a copy without the quantization_config, so that transformers loads plain weights."""
        return without_quantization(hf_config)

    def weights(self, path: Path) -> dict[str, Any] | None:
        """Return the weights, quantized ones dequantized on the device unless `loading` replaces them."""
        return open_weights(path, self._device)

    def loading(self, model_class: Any, weights: dict[str, Any]) -> Any:
        """Return a class with room for rows that carry their scales, if weights are kept."""
        if self.objection is None:
            logger.info("FP8 weights stay as they are; products are of FP8 numbers, activations rounded by token.")
            return row_bytes.keeping(model_class, weights, self)
        logger.warning(
            "FP8 weights are dequantized as they are loaded, because %s: the model takes the memory of an unquantized "
            "one, and activations are not rounded.",
            self.objection,
        )
        return model_class

    def settle(self, model: Any, model_class: Any, text_of: TextOf, replace: Replace) -> None:
        """Separate rows from their scales."""
        if self.objection is not None:
            return
        kept = row_bytes.settle(model, model_class, self, replace)
        logger.info("%d linear layers and %d blocks of experts are FP8.", len(kept.linears), len(kept.experts))
        if kept.left:
            logger.warning(
                "%d FP8 weights are dequantized because of their layout or size, for example %r.",
                len(kept.left),
                kept.left[0],
            )

    def stored_bytes(self, path: Path, model: Any, text_of: TextOf) -> int | None:
        """Return the stored size; layers that are not FP8 take two bytes per number in the checkpoint and in memory."""
        return stored_bytes(path) if self.objection is None else None

    # ------------------------------------------------------------------ rows, see row_bytes.RowForm

    def layout(self, inputs: int) -> Sequence[tuple[torch.dtype, int]]:
        """Return the fields of a row: its numbers, then its scale."""
        return (FP8, inputs), (torch.float32, 1)

    def takes(self, parameter: Tensor) -> bool:
        """Return whether both sizes are multiples of what FP8 products require."""
        return all(size % ALIGNED == 0 for size in parameter.shape[-2:])

    def linear(self, fields: Sequence[Tensor], bias_N: Tensor | None) -> StoredLinear:
        """Make a linear layer that multiplies FP8."""
        rows_NK, scale_N1 = fields
        return Float8Linear(rows_NK, scale_N1.squeeze(-1), bias_N, self._dtype)

    def experts(self, shell: nn.Module, gate_up: Sequence[Tensor], down: Sequence[Tensor]) -> StoredExperts:
        """Make experts that multiply FP8."""
        both = [(rows, scale.squeeze(-1)) for rows, scale in (gate_up, down)]
        return Float8Experts(shell, both[0], both[1], self._dtype)


class Dequantized:
    """A weight dequantized when it is read, for transformers' loader in place of a slice of a file."""

    def __init__(self, weight: Any, scale: Any, device: str) -> None:
        self._weight, self._scale, self._device = weight, scale, device

    def __getitem__(self, index: Any) -> Tensor:
        """Return the part `index` of the weight in float32, on the device.

        float32, because the loader rounds once, to each parameter's own type.
        """
        # One byte per number is copied to the device and becomes four bytes there.
        weight, scale = (part.to(self._device).float() for part in self._stored())
        whole: Tensor = weight.mul_(scale)
        return whole[index]

    def _stored(self) -> tuple[Tensor, Tensor]:
        """FP8 numbers (N, K) and their scales in float32, (N, 1) or (1, 1), on the CPU."""
        scale: Tensor = self._scale[...]
        return self._weight[...], scale.float().reshape(-1, 1)

    def fields(self) -> Sequence[Tensor]:
        """FP8 numbers (N, K) and a scale for each row, (N, 1), on the CPU."""
        weight_NK, scale = self._stored()
        return weight_NK, scale.expand(weight_NK.shape[0], 1)


def objection(stated: Mapping[str, Any], device: str, dtype: torch.dtype) -> str | None:
    """Return why weights cannot stay FP8, in words; None if they can."""
    if not platform_of(device).fp8_products:
        return "this device has no products of FP8 numbers"
    if not env.FP8():
        return "BEHELD_FP8=0"
    if dtype != torch.bfloat16:
        return f"products of FP8 numbers are given in bfloat16, and {str(dtype).removeprefix('torch.')} was asked for"
    if not rounds_activations(stated):
        return "the checkpoint's activations are not FP8"
    return None


def check(stated: Mapping[str, Any]) -> None:
    """Refuse a checkpoint whose `quantization_config` is not FP8 as this module supports it.

    Raises:
        ModelError: names what is not supported.
    """
    if stated.get("kv_cache_scheme"):
        raise ModelError("The checkpoint asks for a quantized KV cache, which is not supported.", _REMEDY)
    for name in ("sparsity_config", "transform_config"):
        if (stated.get(name) or {}).get("format", "dense") != "dense" or (stated.get(name) or {}).get("config_groups"):
            raise ModelError(f"The checkpoint has a {name} of {METHOD}, which is not supported.", _REMEDY)
    groups = stated.get("config_groups") or {}
    if not groups:
        raise ModelError(f"The quantization_config of {METHOD} names no config_groups.", "Fetch the checkpoint again.")
    for group in groups.values():
        form = group.get("format") or stated.get("format")
        if form != FORMAT:
            raise ModelError(f"The weights are in the format {form!r} of {METHOD}, which is not supported.", _REMEDY)
        weights = group.get("weights") or {}
        kind = (weights.get("type"), weights.get("num_bits"), weights.get("strategy"), weights.get("symmetric", True))
        if kind not in [("float", 8, strategy, True) for strategy in _STRATEGIES]:
            words = ("type", "num_bits", "strategy", "symmetric")
            said = ", ".join(f"{word} {value!r}" for word, value in zip(words, kind, strict=True))
            raise ModelError(f"Weights of {METHOD} with {said} are not supported.", _REMEDY)


def rounds_activations(stated: Mapping[str, Any]) -> bool:
    """Return whether every group of the checkpoint declares FP8 activations, which FP8 products require."""
    found = [group.get("input_activations") or {} for group in stated["config_groups"].values()]
    kinds = {(own.get("type"), own.get("num_bits"), own.get("symmetric", True)) for own in found}
    return kinds == {("float", 8, True)}


def without_quantization(hf_config: Any) -> Any:
    """Return a copy of `hf_config` without the quantization_config, so that transformers loads plain weights."""
    plain = copy.deepcopy(hf_config)
    for part in (plain, *(value for value in vars(plain).values() if hasattr(value, "to_dict"))):
        for name in ("quantization_config", "compression_config"):
            if name in vars(part):
                delattr(part, name)
    return plain


def open_weights(path: Path, device: str) -> dict[str, Any]:
    """Return the checkpoint's weights by name, unread; indexing one with `...` reads it, on the CPU.

    Quantized weights are dequantized on `device`; their scales are not listed.

    Raises:
        ModelError: a quantized weight has no scale, a scale has no weight, or their shapes do not fit.
    """
    from safetensors import safe_open

    slices: dict[str, Any] = {}
    for file in weight_files(path):
        opened = safe_open(file, framework="pt", device="cpu")
        slices |= {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 (it is no mapping)
    found: dict[str, Any] = {}
    scales = {name + _SCALE for name, part in slices.items() if part.get_dtype() == _FP8}
    for name, part in slices.items():
        if name in scales or name.endswith(_ACTIVATION_SCALE):
            # Static activation scales: unused, because activations are scaled per token.
            continue
        if name.endswith(".weight" + _SCALE):
            raise ModelError(f"The checkpoint has {name!r} for a weight that is not FP8.", _REMEDY)
        if name + _SCALE in scales:
            found[name] = Dequantized(part, _scale_of(name, part, slices.get(name + _SCALE)), device)
        else:
            found[name] = part
    if not scales:
        raise ModelError(
            "config.json declares FP8 weights, but none of the weights is FP8.", "Fetch the checkpoint again."
        )
    return found


def _scale_of(name: str, weight: Any, scale: Any) -> Any:
    if scale is None:
        raise ModelError(f"The FP8 weight {name!r} has no {name + _SCALE!r}.", "Fetch the checkpoint again.")
    shape, own = list(weight.get_shape()), list(scale.get_shape())
    if own not in ([], [1], [*shape[:-1], 1]):
        raise ModelError(
            f"{name + _SCALE!r} has the shape {own}, but its weight has {shape}: expected one scale, or one per output "
            "channel.",
            _REMEDY,
        )
    return scale


def stored_bytes(path: Path) -> int:
    """Return the bytes that the weights in `path` take as stored."""
    return sum(file.stat().st_size for file in weight_files(path))


def weight_files(path: Path) -> list[Path]:
    """Return the model's weight files; the folder may hold others."""
    index = path / _INDEX
    if index.is_file():
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return [path / name for name in sorted(names)]
    whole = path / "model.safetensors"
    files = [whole] if whole.is_file() else sorted(path.glob("*.safetensors"))
    if not files:
        raise ModelError(
            "Quantized weights are read from safetensors files only, and there are none.", "Fetch the checkpoint again."
        )
    return files
