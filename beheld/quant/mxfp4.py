"""MXFP4 checkpoints: experts whose numbers have four bits, with a scale for each 32 of them.

They stay as they are on a GPU that multiplies FP8 where this is asked for (mxfp4_experts.py), and are dequantized while
loading elsewhere.

An expert's weight (O outputs, I inputs) is stored as `NAME_blocks`, bytes of two numbers each, and `NAME_scales`,
exponents of two in bytes:

    blocks (E, O, I / 32, 16)    the lower half of a byte is the earlier number
    scales (E, O, I / 32)        127 stands for a factor of 1

transformers' class has it the other way round, `NAME` (E, I, O). Every such number is exact in bfloat16.

Shapes: E experts, O outputs, I inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from beheld.core.errors import ModelError
from beheld.parallel.shards import Cut
from beheld.platform.registry import platform_of
from beheld.quant.dequantize import AS_STORED, without_quantization
from beheld.quant.listed_experts import EXPERTS
from beheld.quant.method import Replace, StorageTarget, TextOf
from beheld.quant.mxfp4_experts import MOST_EXPONENT, MXFP4Experts, dequantized, fits, padded, repacked
from beheld.quant.row_bytes import sources_of
from beheld.quant.stored_as import Axis, StoredAs
from beheld.quant.stored_entries import REFETCH, StoredEntries
from beheld.utils import env
from beheld.utils.log import get_logger
from beheld.utils.named_as import named_as

logger = get_logger(__name__)

METHOD = "mxfp4"
_BLOCKS, _SCALES = "_blocks", "_scales"
_BLOCK_BYTES = 16


def make(stated: Mapping[str, Any], target: StorageTarget) -> MXFP4:
    """Return the method for a checkpoint's quantization_config, `stated`; see quant/method.py."""
    return MXFP4(target)


class MXFP4:
    """See QuantMethod.

    Attributes:
        objection: why experts are not kept as stored, in words; None if they are kept.
    """

    name = METHOD
    converted = "its MXFP4 weights dequantized"

    def __init__(self, target: StorageTarget) -> None:
        self.objection = objection(target)

    def config(self, hf_config: Any) -> Any:
        """Return a copy without the quantization_config, so that transformers loads plain weights."""
        return without_quantization(hf_config)

    def weights(self, path: Path) -> dict[str, Any] | None:
        """Return the weights, quantized ones dequantized when they are read unless `loading` replaces them."""
        return open_weights(path)

    def loading(self, model_class: Any, weights: dict[str, Any]) -> Any:
        """Return a class with room for blocks and scales, if experts are kept."""
        if self.objection is None:
            return _keeping(model_class, weights)
        logger.warning(
            "MXFP4 weights are dequantized as they are loaded, because %s: the model takes the memory of an "
            "unquantized one.",
            self.objection,
        )
        return model_class

    def kept_as(self, parameter: Tensor, weights: Sequence[Any]) -> str | None:
        """Return that they are as stored, if the kernel multiplies experts of these weights."""
        blocked = [each for each in weights if isinstance(each, BlockedExperts)]
        kept = self.objection is None and bool(blocked) and all(fits(*each.sizes) for each in blocked)
        return AS_STORED if kept else None

    def settle(self, model: Any, model_class: Any, text_of: TextOf, replace: Replace) -> None:
        """Insert experts that multiply MXFP4 numbers, one block after the other."""
        if self.objection is not None:
            return
        names: list[str] = model.kept_experts
        del model.kept_experts
        model.__class__ = model_class
        for name in names:
            shell = model.get_submodule(name)
            groups = [getattr(shell, each).shape[-1] // (_BLOCK_BYTES + 1) for each in EXPERTS]
            gate_up, down = (_parted(shell, each) for each in EXPERTS)
            parent, _, own = name.rpartition(".")
            made = MXFP4Experts(shell, gate_up, down, groups)
            replace(model.get_submodule(parent), own, made, lambda module: module.restored())  # type: ignore[operator]
        logger.info(
            "%d blocks of experts keep their MXFP4 numbers (BEHELD_KEEP_BITS=0 dequantizes them instead).", len(names)
        )

    def stored_bytes(
        self, path: Path, model: Any, text_of: TextOf, weights: Mapping[str, Any] | None = None
    ) -> int | None:
        """Return the bytes with kept experts; None: weights take what their numbers take."""
        if self.objection is not None:
            return None
        weights = open_weights(path) if weights is None else weights
        total = sum(parameter.nbytes for parameter in model.parameters())
        for name, sources in _kept(model, weights).items():
            shell = model.get_submodule(name)
            total -= sum(getattr(shell, each).nbytes for each in EXPERTS)
            total += sum(weights[source].num_bytes for source in sources)
        return int(total)


def objection(target: StorageTarget) -> str | None:
    """Return why experts cannot stay as they are, in words; None if they can."""
    platform = platform_of(target.device)
    if platform.shares_host_memory:
        return "only a GPU multiplies them"
    if not platform.fp8_products:
        return "this device has no products of FP8 numbers, which the kernel makes of them"
    if not platform.has_triton:
        return "Triton is not installed"
    if not env.KEEP_BITS():
        return "BEHELD_KEEP_BITS=0"
    if target.exact or target.dtype != torch.bfloat16:
        return f"products are of bfloat16, not {str(target.dtype).removeprefix('torch.')}"
    return None


def _keeping(model_class: Any, weights: dict[str, Any]) -> Any:
    """Return a subclass of `model_class` whose experts have room for blocks and scales, listed in `kept_experts`."""

    class KeepingBlocks(model_class):
        def __init__(self, config: Any, *args: Any, **keywords: Any) -> None:
            super().__init__(config, *args, **keywords)
            kept = _kept(self, weights)
            self.kept_experts = list(kept)
            for name, sources in kept.items():
                for each, source in zip(EXPERTS, sources, strict=True):
                    experts: Any = self.get_submodule(name)
                    wide = torch.empty(weights[source].shape, dtype=torch.uint8, device=getattr(experts, each).device)
                    setattr(experts, each, nn.Parameter(wide, requires_grad=False))
                    weights[source] = CarryingBlocks(weights[source])

    return named_as(KeepingBlocks, model_class)


def _kept(model: Any, weights: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the experts of a model, and their weights' names, that the kernel multiplies."""
    names_by_target, joined = sources_of(model, dict(weights))
    found: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        sources = [names_by_target.get(f"{name}.{each}", []) for each in EXPERTS]
        if not all(len(own) == 1 and isinstance(weights[own[0]], BlockedExperts) for own in sources):
            continue
        plain = not any(joined[f"{name}.{each}"] for each in EXPERTS) and hasattr(module, "_apply_gate")
        if plain and all(fits(*weights[own[0]].sizes) for own in sources):
            found[name] = [own[0] for own in sources]
    return found


def _parted(shell: Any, name: str) -> tuple[Tensor, Tensor]:
    """Return the bytes and exponents of experts that were loaded, in the kernel's order; the shell loses them.

    Raises:
        ModelError: an exponent is too great for the kernel of a single row.
    """
    carrying = getattr(shell, name).data
    setattr(shell, name, None)
    # Of 17 bytes for 32 numbers one is their exponent.
    groups = carrying.shape[-1] // (_BLOCK_BYTES + 1)
    blocks, scales = carrying.split([groups * _BLOCK_BYTES, groups], dim=-1)
    most = int(scales.max())
    if most > MOST_EXPONENT:
        raise ModelError(
            f"'{name}{_SCALES}' holds {most}, a factor of 2^{most - 127}; kept MXFP4 weights take at most "
            f"2^{MOST_EXPONENT - 127}.",
            "Set BEHELD_KEEP_BITS=0, or fetch the checkpoint again if such a factor is not meant.",
        )
    return repacked(blocks.unflatten(-1, (groups, _BLOCK_BYTES)), scales)


class BlockedExperts:
    """Experts' weights (E, I, O), dequantized when they are read, for transformers' loader in place of a slice.

    Attributes:
        sizes: outputs and inputs.
        shape: of a byte for each two numbers and for each exponent, (E, O, I 17 / 32).
        num_bytes: of blocks and scales as the kernel has them.
    """

    def __init__(self, blocks: Any, scales: Any) -> None:
        self._blocks, self._scales = blocks, scales
        experts, outputs, groups = scales.get_shape()
        self.sizes = outputs, groups * 2 * _BLOCK_BYTES
        # Of (E, I, O).
        axes = Axis(0), Axis(2, 2 * _BLOCK_BYTES), Axis(1)
        self._as_stored = StoredAs((experts, *reversed(self.sizes)), {"blocks": axes, "scales": axes})
        self.shape = experts, outputs, groups * (_BLOCK_BYTES + 1)
        # Kept with inputs padded.
        self.num_bytes = experts * outputs * padded(self.sizes[1]) * (_BLOCK_BYTES + 1) // (2 * _BLOCK_BYTES)

    def rank_part(self, cut: Cut) -> BlockedExperts | None:
        """Return what a rank holds, of which no more is read; None if it holds a part of a group, or zeros."""
        parts = self._as_stored.entries_of({"blocks": self._blocks, "scales": self._scales}, cut)
        return None if parts is None else BlockedExperts(**parts)

    def __getitem__(self, index: Any) -> Tensor:
        """Return the part `index` in bfloat16, which holds every number of it."""
        return dequantized(self._blocks[...], self._scales[...])[index]

    def stored(self) -> Tensor:
        """Return blocks and then scales of each output, (E, O, I 17 / 32) in bytes."""
        return torch.cat([self._blocks[...].flatten(2), self._scales[...]], dim=-1)


class CarryingBlocks:
    """Experts' weights as they are stored, for the loader in place of a slice of a file."""

    def __init__(self, weight: BlockedExperts) -> None:
        self._weight = weight

    def __getitem__(self, index: Any) -> Tensor:
        """Return the part `index` of blocks and scales."""
        return self._weight.stored()[index]


def open_weights(path: Path) -> dict[str, Any]:
    """Return the checkpoint's weights by name, unread; indexing one with `...` reads it, on the CPU.

    Raises:
        ModelError: blocks have no scales, scales no blocks, or their shapes do not fit.
    """
    entries = StoredEntries(path)
    found = dict(entries.slices)
    modules = entries.ending(_BLOCKS)
    if not modules:
        raise ModelError("config.json declares MXFP4 weights, but none of the weights is MXFP4.", REFETCH)
    for name in modules:
        blocks = name + _BLOCKS
        scales = entries.partner(blocks, name + _SCALES)
        shape = entries.shape(scales)
        if len(shape) != 3:
            raise entries.refusal(scales, f"has the shape {shape}; expected experts, outputs and groups")
        entries.require(scales, ["U8"], shape)
        entries.require(blocks, ["U8"], [*shape, _BLOCK_BYTES])
        entries.refuse_zeros(scales)
        found[name] = BlockedExperts(found.pop(blocks), found.pop(scales))
    entries.refuse_left(found, (_SCALES,), _BLOCKS)
    return found
