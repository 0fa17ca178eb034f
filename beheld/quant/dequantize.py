"""Weights that are dequantized as transformers' loader reads them, one at a time; the device holds plain weights.

A method of this kind looks at names, types and shapes in the files' headers, refuses what does not fit, and gives a
`LazyWeight` for each quantized weight. It needs no entry for modules that stay unquantized: they have plain weights.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

from torch import Tensor

from beheld.parallel.shards import Cut
from beheld.quant.method import Replace, TextOf
from beheld.quant.stored_as import StoredAs
from beheld.utils.log import get_logger

logger = get_logger(__name__)

# What QuantMethod.kept_as says of weights whose numbers and scales are the checkpoint's.
AS_STORED = "as stored"


class LazyWeight:
    """A weight computed from stored entries when it is read, for transformers' loader in place of a slice of a file.

    Args:
        parts: the entries by name, unread.
        compute: makes the weight of them.
        device: where.
        stored: how outputs and inputs lie in the entries; None: ranks read the whole.
        shaped: whether `compute` takes the weight's `shape` too, (N, K).
    """

    def __init__(
        self,
        parts: Mapping[str, Any],
        compute: Callable[..., Tensor],
        device: str,
        stored: StoredAs | None = None,
        *,
        shaped: bool = False,
    ) -> None:
        self._parts, self._compute, self._device = parts, compute, device
        self._stored, self._shaped = stored, shaped

    def __getitem__(self, index: Any) -> Tensor:
        """Return the part `index` of the weight in float32, which the loader rounds once to the parameter's type."""
        # Stored numbers are copied to the device and widened there.
        entries = {name: part[...].to(self._device) for name, part in self._parts.items()}
        return self._compute(**entries, **self._known())[index]

    def _known(self) -> dict[str, Any]:
        if not self._shaped:
            return {}
        assert self._stored is not None, "it knows the shape"
        return {"shape": self._stored.shape}

    def rank_part(self, cut: Cut) -> Self | None:
        """Return what a rank holds, of which no more is read; None if its entries cannot be cut there."""
        if self._stored is None:
            return None
        parts = self._stored.entries_of(self._parts, cut)
        if parts is None:
            return None
        made = copy.copy(self)
        made._parts, made._stored = parts, self._stored.part(cut)
        return made


class WeightKeeper(Protocol):
    """What keeps weights in memory as they are stored; see kept_groups.py.

    Attributes:
        objection: why it does not, in words; None if it does.
    """

    objection: str | None

    def loading(self, model_class: Any, weights: dict[str, Any]) -> Any:
        """See QuantMethod."""

    def takes(self, parameter: Tensor, weights: Sequence[Any]) -> bool:
        """See row_bytes.RowForm."""

    def settle(self, model: Any, model_class: Any, replace: Replace) -> None:
        """See QuantMethod."""

    def stored_bytes(self, weights: Mapping[str, Any], model: Any) -> int:
        """Return the bytes of a model on the meta device with these weights, by name."""


class DequantizingMethod:
    """See QuantMethod; weights are dequantized, unless something keeps them.

    Attributes:
        name: the checkpoint's `quant_method`.
        converted: what is done to stored weights, in words.
    """

    def __init__(
        self, name: str, words: str, read: Callable[[Path], dict[str, Any]], keeping: WeightKeeper | None = None
    ) -> None:
        """Make the method.

        Args:
            words: what the weights are, as in "4-bit weights (AWQ)".
            read: returns a checkpoint's weights by name, unread.
            keeping: keeps weights as they are stored, unless it objects.
        """
        self.name = name
        self._keeping = keeping
        self.converted = f"its {words} dequantized"
        self._words, self._read = words, read

    def config(self, hf_config: Any) -> Any:
        """Return a copy without the quantization_config, so that transformers loads plain weights."""
        return without_quantization(hf_config)

    def weights(self, path: Path) -> dict[str, Any] | None:
        """Return the weights, quantized ones dequantized when they are read."""
        return self._read(path)

    def loading(self, model_class: Any, weights: dict[str, Any]) -> Any:
        """Return the class, with room for weights that are kept."""
        if self._keeping is not None and self._keeping.objection is None:
            return self._keeping.loading(model_class, weights)
        why = "" if self._keeping is None else f", because {self._keeping.objection}"
        logger.warning(
            "%s are dequantized as they are loaded%s: the model takes the memory of an unquantized one.",
            self._words,
            why,
        )
        return model_class

    def kept_as(self, parameter: Tensor, weights: Sequence[Any]) -> str | None:
        """Return that they are as stored, if they are kept."""
        kept = self._keeping if self._keeping is not None and self._keeping.objection is None else None
        return AS_STORED if kept is not None and are_kept(kept.takes, parameter, weights) else None

    def settle(self, model: Any, model_class: Any, text_of: TextOf, replace: Replace) -> None:
        """Insert layers that multiply kept weights, if there are any."""
        if self._keeping is not None and self._keeping.objection is None:
            self._keeping.settle(model, model_class, replace)

    def stored_bytes(
        self, path: Path, model: Any, text_of: TextOf, weights: Mapping[str, Any] | None = None
    ) -> int | None:
        """Return the bytes with kept weights; None: weights take what their numbers take."""
        if self._keeping is None or self._keeping.objection is not None:
            return None
        return self._keeping.stored_bytes(self._read(path) if weights is None else weights, model)


def are_kept(takes: Callable[[Tensor, Sequence[Any]], bool], parameter: Tensor, weights: Sequence[Any]) -> bool:
    """Return whether a row form keeps a parameter of these weights; see row_bytes.RowForm.takes."""
    return bool(weights) and all(hasattr(each, "fields") for each in weights) and takes(parameter, weights)


def without_quantization(hf_config: Any) -> Any:
    """Return a copy of `hf_config` without the quantization_config, so that transformers loads plain weights."""
    plain = copy.deepcopy(hf_config)
    for part in (plain, *(value for value in vars(plain).values() if hasattr(value, "to_dict"))):
        for name in ("quantization_config", "compression_config"):
            if name in vars(part):
                delattr(part, name)
    return plain
