"""Entries of a checkpoint's safetensors files, looked at by their headers and read one at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from beheld.checkpoint.weights import weight_files
from beheld.core.errors import ModelError

REFETCH = "Fetch the checkpoint again, or use another one of this model."
SCALE_TYPES = ("F16", "BF16", "F32")


def check_group_size(size: Any) -> int:
    """Return a stated group size: a number of inputs, or -1 for all of a layer.

    Raises:
        ModelError: it is neither.
    """
    if type(size) is not int or size == 0 or size < -1:
        raise ModelError(f"The checkpoint states the group_size {size!r}; expected a whole number.", REFETCH)
    return size


class StoredEntries:
    """The entries of a checkpoint's safetensors files, unread.

    Attributes:
        slices: name -> an unread entry, which indexing with `...` reads.
        metadata: the metadata in the files' headers.
    """

    def __init__(self, path: Path) -> None:
        from safetensors import safe_open

        self.slices: dict[str, Any] = {}
        self.metadata: dict[str, str] = {}
        self._files: dict[str, str] = {}
        for file in entry_files(path):
            opened = safe_open(file, framework="pt", device="cpu")
            self.metadata |= opened.metadata() or {}
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

    def refuse_zeros(self, name: str) -> None:
        """Refuse scales that are all zero: every number of their weight would be.

        A group, or an output, of zeros may have a scale of zero.

        Raises:
            ModelError: they are.
        """
        entry = self.slices[name]
        # The first row nearly always tells.
        first = entry[:1] if self.shape(name) else entry[...]
        if first.numel() and not first.float().any() and not entry[...].float().any():
            raise self.refusal(name, "holds nothing but zeros; scales of zero leave nothing of a weight")

    def refuse_left(self, left: Mapping[str, Any], suffixes: Sequence[str], owner: str) -> None:
        """Check that none of the names `left` ends with a suffix of what belongs to an entry ending with `owner`.

        Raises:
            ModelError: one does.
        """
        for name in left:
            for suffix in suffixes:
                if name.endswith(suffix):
                    raise self.refusal(name, f"has no {name.removesuffix(suffix) + owner!r}")

    def in_order(self, name: str, inputs: int, groups: int, group_size: int) -> bool:
        """Return whether the groups of a layer's inputs, which the entry names and which are read, are runs of inputs.

        Raises:
            ModelError: a group is none of `groups`, or the entry is of another type or shape.
        """
        self.require(name, ["I32", "I64"], [inputs])
        groups_K = self.slices[name][...].long()
        least, greatest = int(groups_K.min()), int(groups_K.max())
        if least < 0 or greatest >= groups:
            raise self.refusal(name, f"names the groups {least} to {greatest}, but there are scales of {groups} groups")
        return torch.equal(groups_K, torch.arange(inputs) // group_size)

    def in_equal_groups(self, name: str, groups: int) -> bool:
        """Return whether all groups of a layer's inputs, which the entry names and which are read, are of one size."""
        counts_G = self.slices[name][...].long().bincount(minlength=groups)
        return bool((counts_G == counts_G[0]).all())

    def refusal(self, name: str, words: str, remedy: str = REFETCH) -> ModelError:
        """Return an error about an entry, which names its file."""
        return ModelError(f"{self._files[name]}: {name!r} {words}.", remedy)


def entry_files(path: Path) -> list[Path]:
    """Return the checkpoint's files of weights, in the loader's preference; all are safetensors.

    Raises:
        ModelError: there are none, or the index that names them is damaged.
    """
    files = [path / name for name in weight_files(path) if name.endswith(".safetensors")]
    if not files:
        raise ModelError(
            "Quantized weights are read from safetensors files only, and there are none.", "Fetch the checkpoint again."
        )
    return files
