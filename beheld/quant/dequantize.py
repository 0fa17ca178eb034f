"""Weights that are dequantized as transformers' loader reads them, one at a time; the device holds plain weights.

A method of this kind looks at names, types and shapes in the files' headers, refuses what does not fit, and gives a
`LazyWeight` for each quantized weight. It needs no entry for modules that stay unquantized: they have plain weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from beheld.core.errors import ModelError
from beheld.quant.compressed_tensors import weight_files, without_quantization
from beheld.quant.method import Replace, TextOf
from beheld.utils.log import get_logger

logger = get_logger(__name__)

REFETCH = "Fetch the checkpoint again, or use another one of this model."
SCALE_TYPES = ("F16", "BF16", "F32")


class StoredEntries:
    """The entries of a checkpoint's safetensors files, unread.

    Attributes:
        slices: name -> an unread entry, which indexing with `...` reads.
    """

    def __init__(self, path: Path) -> None:
        from safetensors import safe_open

        self.slices: dict[str, Any] = {}
        self._files: dict[str, str] = {}
        for file in weight_files(path):
            opened = safe_open(file, framework="pt", device="cpu")
            for name in opened.keys():  # noqa: SIM118 (it is no mapping)
                self.slices[name] = opened.get_slice(name)
                self._files[name] = file.name

    def ending(self, suffix: str) -> list[str]:
        """Return what precedes `suffix` in the names that end with it."""
        return [name.removesuffix(suffix) for name in self.slices if name.endswith(suffix)]

    def shape(self, name: str) -> list[int]:
        """Return the shape of an entry."""
        return list(self.slices[name].get_shape())

    def partner(self, name: str, other: str) -> str:
        """Return `other`, which `name` cannot do without.

        Raises:
            ModelError: there is none.
        """
        if other not in self.slices:
            raise self.refusal(name, f"has no {other!r}")
        return other

    def require(self, name: str, types: Sequence[str], *shapes: Sequence[int]) -> None:
        """Check an entry's type, one of `types`, and its shape, one of `shapes`.

        Raises:
            ModelError: they are others.
        """
        kind, shape = self.slices[name].get_dtype(), self.shape(name)
        if kind not in types:
            raise self.refusal(name, f"is of the type {kind}; expected {' or '.join(types)}")
        if shape not in [list(each) for each in shapes]:
            wanted = " or ".join(str(list(each)) for each in shapes)
            raise self.refusal(name, f"has the shape {shape}; expected {wanted}")

    def refuse_left(self, left: Mapping[str, Any], suffixes: Sequence[str], owner: str) -> None:
        """Check that none of the names `left` ends with a suffix of what belongs to an entry ending with `owner`.

        Raises:
            ModelError: one does.
        """
        for name in left:
            for suffix in suffixes:
                if name.endswith(suffix):
                    raise self.refusal(name, f"has no {name.removesuffix(suffix) + owner!r}")

    def refusal(self, name: str, words: str, remedy: str = REFETCH) -> ModelError:
        """Return an error about an entry, which names its file."""
        return ModelError(f"{self._files[name]}: {name!r} {words}.", remedy)


class LazyWeight:
    """A weight computed from stored entries when it is read, for transformers' loader in place of a slice of a file."""

    def __init__(self, parts: Mapping[str, Any], compute: Callable[..., Tensor], device: str) -> None:
        self._parts, self._compute, self._device = parts, compute, device

    def __getitem__(self, index: Any) -> Tensor:
        """Return the part `index` of the weight in float32, which the loader rounds once to the parameter's type."""
        # Stored numbers are copied to the device and widened there.
        return self._compute(**{name: part[...].to(self._device) for name, part in self._parts.items()})[index]


class DequantizingMethod:
    """See QuantMethod; nothing is kept as stored.

    Attributes:
        name: the checkpoint's `quant_method`.
        converted: what is done to stored weights, in words.
    """

    def __init__(self, name: str, words: str, read: Callable[[Path], dict[str, Any]]) -> None:
        """Make the method.

        Args:
            words: what the weights are, as in "4-bit weights (AWQ)".
            read: returns a checkpoint's weights by name, unread.
        """
        self.name = name
        self.converted = f"its {words} dequantized"
        self._words, self._read = words, read

    def config(self, hf_config: Any) -> Any:
        """Return a copy without the quantization_config, so that transformers loads plain weights."""
        return without_quantization(hf_config)

    def weights(self, path: Path) -> dict[str, Any] | None:
        """Return the weights, quantized ones dequantized when they are read."""
        return self._read(path)

    def loading(self, model_class: Any, weights: dict[str, Any]) -> Any:
        """Return the class unchanged."""
        logger.warning(
            "%s are dequantized as they are loaded: the model takes the memory of an unquantized one.", self._words
        )
        return model_class

    def settle(self, model: Any, model_class: Any, text_of: TextOf, replace: Replace) -> None:
        """Do nothing."""

    def stored_bytes(self, path: Path, model: Any, text_of: TextOf) -> int | None:
        """Return None: weights take what their numbers take."""
        return None
