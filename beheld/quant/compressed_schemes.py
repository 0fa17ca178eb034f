"""What a quantization_config of compressed-tensors says of its weights: a scheme for each group of modules.

A module's entries decide which of the schemes is its own; groups' targets are names in the model at the time of
writing, which need not be those in the files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from beheld.core.errors import ModelError

METHOD = "compressed-tensors"
_REMEDY = (
    f"Use the unquantized checkpoint, or one of {METHOD!r} with FP8 weights (by channel, tensor or block), NVFP4 "
    "weights, or whole numbers of 4 or 8 bits (by channel, tensor or group)."
)
# Format -> the kinds of weights that it may hold: type and bits.
_KINDS = {
    "float-quantized": (("float", 8),),
    "int-quantized": (("int", 8),),
    "naive-quantized": (("float", 8), ("int", 8)),
    "pack-quantized": (("int", 4), ("int", 8)),
    "nvfp4-pack-quantized": (("float", 4),),
}
_STRATEGIES = {
    ("float", 8): ("channel", "tensor", "block"),
    ("float", 4): ("tensor_group",),
    ("int", 4): ("channel", "tensor", "group"),
    ("int", 8): ("channel", "tensor", "group"),
}
# Inputs that share a scale in NVFP4.
NVFP4_GROUP = 16


@dataclass(frozen=True)
class CompressedScheme:
    """How the weights of a group of modules are stored.

    Attributes:
        type: "float" or "int".
        bits: of a number.
        packed: whether numbers are packed, whole ones into words of 32 bits.
        strategy: what shares a scale: "tensor", "channel" (an output), "group" (of an output's inputs), "block", or
            "tensor_group" (a group's scale has a divisor for the whole tensor).
        sizes: the size of a group, or those of a block; empty for others.
        symmetric: whether there are no zero points.
    """

    type: str
    bits: int
    packed: bool
    strategy: str
    sizes: tuple[int, ...]
    symmetric: bool

    @property
    def has_rows(self) -> bool:
        """Whether weights are FP8 with a scale for each output or for the whole."""
        return self.type == "float" and self.strategy in ("channel", "tensor")

    @property
    def is_nvfp4(self) -> bool:
        """Whether weights are floating-point numbers of four bits."""
        return (self.type, self.bits) == ("float", 4)

    @property
    def word(self) -> str:
        """What weights are, in short."""
        return "NVFP4" if self.is_nvfp4 else "FP8" if self.type == "float" else f"{self.bits}-bit"

    def __str__(self) -> str:
        sizes = f" of {' x '.join(map(str, self.sizes))}" if self.sizes else ""
        return f"{self.bits}-bit {self.type} by {self.strategy}{sizes}{'' if self.symmetric else ' with zero points'}"


FP8_ROWS = CompressedScheme("float", 8, packed=False, strategy="channel", sizes=(), symmetric=True)


def schemes_of(stated: Mapping[str, Any]) -> tuple[CompressedScheme, ...]:
    """Return the schemes of a quantization_config.

    Raises:
        ModelError: names what is not supported.
    """
    for name in ("sparsity_config", "transform_config"):
        if (stated.get(name) or {}).get("format", "dense") != "dense" or (stated.get(name) or {}).get("config_groups"):
            raise ModelError(f"The checkpoint has a {name} of {METHOD}, which is not supported.", _REMEDY)
    groups = stated.get("config_groups") or {}
    if not groups:
        raise ModelError(f"The quantization_config of {METHOD} names no config_groups.", "Fetch the checkpoint again.")
    found = (
        _scheme(group.get("weights") or {}, group.get("format") or stated.get("format")) for group in groups.values()
    )
    return tuple(dict.fromkeys(found))


def _scheme(weights: Mapping[str, Any], form: Any) -> CompressedScheme:
    kinds = _KINDS.get(str(form))
    if kinds is None:
        raise ModelError(f"The weights are in the format {form!r} of {METHOD}, which is not supported.", _REMEDY)
    words = ("type", "num_bits", "strategy", "symmetric", "group_size", "block_structure")
    own: dict[str, Any] = {"symmetric": True} | {word: weights[word] for word in words if weights.get(word) is not None}
    kind: tuple[Any, Any] = own.get("type"), own.get("num_bits")
    strategy: Any = own.get("strategy")
    if strategy is None:
        # Left out, it follows from the size of a group.
        strategy = own["strategy"] = "tensor" if own.get("group_size") is None else "group"
    if strategy == "group" and own.get("group_size") == -1:
        strategy = own["strategy"] = "channel"
    group = [own.get("group_size")]
    by_strategy: dict[str, Any] = {"group": group, "tensor_group": group, "block": own.get("block_structure")}
    sizes = by_strategy.get(strategy, [])
    fits = kind in kinds and strategy in _STRATEGIES[kind] and (own["symmetric"] is True or kind[0] == "int")
    fits = fits and (strategy != "tensor_group" or sizes == [NVFP4_GROUP])
    if not fits or not _are_sizes(sizes, {"group": 1, "tensor_group": 1, "block": 2}.get(strategy, 0)):
        said = ", ".join(f"{word} {own.get(word)!r}" for word in words if word in own)
        raise ModelError(f"Weights in the format {form!r} of {METHOD} with {said} are not supported.", _REMEDY)
    return CompressedScheme(
        kind[0], kind[1], str(form).endswith("pack-quantized"), strategy, tuple(sizes), symmetric=own["symmetric"]
    )


def _are_sizes(sizes: Any, count: int) -> bool:
    return isinstance(sizes, list) and len(sizes) == count and all(type(size) is int and size > 0 for size in sizes)
