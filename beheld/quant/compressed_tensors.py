"""FP8 checkpoints in the form of compressed-tensors: multiplied as they are stored, or dequantized as they are loaded.

Each quantized weight comes with its scale, one number for each output channel or one for the whole. Where the device
multiplies FP8, weights are kept (row_bytes.py, float8.py). Elsewhere the product is made when transformers' loader asks
for the weight, hence before it merges or renames anything: scales need not follow.
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
from beheld.quant.method import Replace
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
    """The method of a checkpoint that says `stated`; see quant/method.py."""
    check(stated)
    return CompressedTensors(stated, device, dtype)


class CompressedTensors:
    """See QuantMethod.

    Attributes:
        objection: why weights are not kept as they are stored, in words; None if they are.
    """

    name = METHOD
    converted = "its FP8 weights dequantized"

    def __init__(self, stated: Mapping[str, Any], device: str, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype
        self.objection = objection(stated, device, dtype)

    def config(self, hf_config: Any) -> Any:
        """A copy that says nothing of quantization, so that transformers loads plain weights."""
        return without_quantization(hf_config)

    def weights(self, path: Path) -> dict[str, Any] | None:
        """Quantized ones stand there dequantized, on the device, unless `loading` says otherwise."""
        return open_weights(path, self._device)

    def loading(self, model_class: Any, weights: dict[str, Any]) -> Any:
        """With room for rows that carry their scale, where weights are kept."""
        if self.objection is None:
            logger.info("FP8 weights stay as they are; products are of FP8 numbers, activations rounded by token.")
            return row_bytes.keeping(model_class, weights, self)
        logger.warning(
            "FP8 weights are dequantized as they are loaded, since %s: the model takes the memory of an unquantized "
            "one, and activations are not rounded.",
            self.objection,
        )
        return model_class

    def settle(self, model: Any, model_class: Any, replace: Replace) -> None:
        """Part rows and scales."""
        if self.objection is not None:
            return
        kept = row_bytes.settle(model, model_class, self, replace)
        logger.info("%d linear layers and %d blocks of experts are FP8.", len(kept.linears), len(kept.experts))
        if kept.left:
            logger.warning(
                "%d FP8 weights are dequantized for their form or size, for example %r.", len(kept.left), kept.left[0]
            )

    def stored_bytes(self, path: Path) -> int | None:
        """A checkpoint's layers that are not FP8 are of two bytes there as they are here."""
        return stored_bytes(path) if self.objection is None else None

    # ------------------------------------------------------------------ rows, see row_bytes.RowForm

    def layout(self, inputs: int) -> Sequence[tuple[torch.dtype, int]]:
        """The numbers of a row, and its scale."""
        return (FP8, inputs), (torch.float32, 1)

    def takes(self, parameter: Tensor) -> bool:
        """True if both sizes are multiples of what products want."""
        return all(size % ALIGNED == 0 for size in parameter.shape[-2:])

    def linear(self, fields: Sequence[Tensor], bias_N: Tensor | None) -> StoredLinear:
        """A layer that multiplies FP8."""
        rows_NK, scale_N1 = fields
        return Float8Linear(rows_NK, scale_N1.squeeze(-1), bias_N, self._dtype)

    def experts(self, shell: nn.Module, gate_up: Sequence[Tensor], down: Sequence[Tensor]) -> StoredExperts:
        """Experts that multiply FP8."""
        both = [(rows, scale.squeeze(-1)) for rows, scale in (gate_up, down)]
        return Float8Experts(shell, both[0], both[1], self._dtype)


class Dequantized:
    """A weight that is computed when it is read: what transformers' loader takes in place of a slice of a file."""

    def __init__(self, weight: Any, scale: Any, device: str) -> None:
        self._weight, self._scale, self._device = weight, scale, device

    def __getitem__(self, index: Any) -> Tensor:
        """The part `index` of the weight, float32, on the device.

        float32, because the loader rounds to each parameter's own type, once.
        """
        # One byte for each number goes to the device, and becomes four there.
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
    """Why not FLOAT8, in words; None if nothing speaks against it."""
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
    """Refuse a checkpoint whose `quantization_config` is not of FP8 weights as described above.

    Raises:
        ModelError: naming what is not built.
    """
    if stated.get("kv_cache_scheme"):
        raise ModelError("The checkpoint asks for a quantized KV cache, which is not built.", _REMEDY)
    for name in ("sparsity_config", "transform_config"):
        if (stated.get(name) or {}).get("format", "dense") != "dense" or (stated.get(name) or {}).get("config_groups"):
            raise ModelError(f"The checkpoint has a {name} of {METHOD}, which is not built.", _REMEDY)
    groups = stated.get("config_groups") or {}
    if not groups:
        raise ModelError(f"The quantization_config of {METHOD} names no config_groups.", "Fetch the checkpoint again.")
    for group in groups.values():
        form = group.get("format") or stated.get("format")
        if form != FORMAT:
            raise ModelError(f"The weights are in the format {form!r} of {METHOD}, which is not built.", _REMEDY)
        weights = group.get("weights") or {}
        kind = (weights.get("type"), weights.get("num_bits"), weights.get("strategy"), weights.get("symmetric", True))
        if kind not in [("float", 8, strategy, True) for strategy in _STRATEGIES]:
            words = ("type", "num_bits", "strategy", "symmetric")
            said = ", ".join(f"{word} {value!r}" for word, value in zip(words, kind, strict=True))
            raise ModelError(f"Weights of {METHOD} with {said} are not built.", _REMEDY)


def rounds_activations(stated: Mapping[str, Any]) -> bool:
    """True if every group of the checkpoint says that activations are FP8 too, as products of FP8 numbers want them."""
    found = [group.get("input_activations") or {} for group in stated["config_groups"].values()]
    kinds = {(own.get("type"), own.get("num_bits"), own.get("symmetric", True)) for own in found}
    return kinds == {("float", 8, True)}


def without_quantization(hf_config: Any) -> Any:
    """A copy of `hf_config` that says nothing of quantization, so that transformers loads plain weights."""
    plain = copy.deepcopy(hf_config)
    for part in (plain, *(value for value in vars(plain).values() if hasattr(value, "to_dict"))):
        for name in ("quantization_config", "compression_config"):
            if name in vars(part):
                delattr(part, name)
    return plain


def open_weights(path: Path, device: str) -> dict[str, Any]:
    """Name -> weight of the checkpoint in `path`, none of them read yet; indexing with `...` reads one, on the CPU.

    Quantized weights stand there dequantized, on `device`; their scales do not appear.

    Raises:
        ModelError: a quantized weight lacks its scale, or the other way round, or their shapes do not fit.
    """
    from safetensors import safe_open

    slices: dict[str, Any] = {}
    for file in _files(path):
        opened = safe_open(file, framework="pt", device="cpu")
        slices |= {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 (it is no mapping)
    found: dict[str, Any] = {}
    scales = {name + _SCALE for name, part in slices.items() if part.get_dtype() == _FP8}
    for name, part in slices.items():
        if name in scales or name.endswith(_ACTIVATION_SCALE):
            # Scales of activations fixed beforehand: activations are not rounded here.
            continue
        if name.endswith(".weight" + _SCALE):
            raise ModelError(f"The checkpoint has {name!r} for a weight that is not FP8.", _REMEDY)
        if name + _SCALE in scales:
            found[name] = Dequantized(part, _scale_of(name, part, slices.get(name + _SCALE)), device)
        else:
            found[name] = part
    if not scales:
        raise ModelError("config.json says that weights are FP8, but none is.", "Fetch the checkpoint again.")
    return found


def _scale_of(name: str, weight: Any, scale: Any) -> Any:
    if scale is None:
        raise ModelError(f"The FP8 weight {name!r} has no {name + _SCALE!r}.", "Fetch the checkpoint again.")
    shape, own = list(weight.get_shape()), list(scale.get_shape())
    if own not in ([], [1], [*shape[:-1], 1]):
        raise ModelError(
            f"{name + _SCALE!r} has the shape {own}, but its weight has {shape}: neither one scale nor one a channel.",
            _REMEDY,
        )
    return scale


def stored_bytes(path: Path) -> int:
    """What the weights in `path` take as they are stored."""
    return sum(file.stat().st_size for file in _files(path))


def _files(path: Path) -> list[Path]:
    """The files that make up the model, which may lie beside others."""
    index = path / _INDEX
    if index.is_file():
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return [path / name for name in sorted(names)]
    whole = path / "model.safetensors"
    files = [whole] if whole.is_file() else sorted(path.glob("*.safetensors"))
    if not files:
        raise ModelError("FP8 weights are read from safetensors only, of which there are none.", _REMEDY)
    return files
