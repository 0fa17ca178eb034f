"""Weights that keep the type of a checkpoint's files until they are needed, on a CPU.

transformers' loader maps files into memory, and casts what has another type than the model: all of it is held twice
then, and the files' pages stay. Here parameters have the files' type while they are loaded, so that the loader copies
nothing. A weight that is rounded is rounded from the file's numbers, any other one is cast, one by one, and the file's
pages go back on the way.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from beheld.checkpoint.weights import weight_files
from beheld.platform import host
from beheld.utils.named_as import named_as

_TYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
# A module's parameters that have the model's type in the end, while some keep the files'.
_NAMES = "_of_file_type"
# Smaller weights are not worth it. Numbers that are cast at a time.
_FEWEST, _PIECE = 1 << 12, 1 << 22


def type_by_shape(path: Path, dtype: torch.dtype) -> dict[tuple[int, ...], torch.dtype]:
    """Return the type of matrices in the safetensors files of a checkpoint, by shape.

    Left out are shapes that several types have, and matrices of the type `dtype`. A parameter that the loader makes of
    several entries has the shape of none as a rule; if it has, loading it takes more memory, and that is all.
    """
    found: dict[tuple[int, ...], set[str]] = {}
    for file in weight_files(path):
        if not file.endswith(".safetensors"):
            continue
        with (path / file).open("rb") as opened:
            header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
        for name, entry in header.items():
            if name != "__metadata__" and len(entry["shape"]) == 2:
                found.setdefault(tuple(entry["shape"]), set()).add(entry["dtype"])
    one = {shape: next(iter(kinds)) for shape, kinds in found.items() if len(kinds) == 1}
    return {shape: _TYPES[kind] for shape, kind in one.items() if _TYPES.get(kind, dtype) != dtype}


def keeping(model_class: Any, types: Mapping[tuple[int, ...], torch.dtype], dtype: torch.dtype) -> Any:
    """Return a subclass whose models have matrices of these shapes in the types `types`, until `cast` ends that.

    Returns the class itself if there are none.

    Args:
        dtype: the model's; parameters of another type keep it.
    """
    if not types:
        return model_class

    class OfFileTypes(model_class):
        def __init__(self, *args: Any, **keywords: Any) -> None:
            super().__init__(*args, **keywords)
            exact, changed = _exact(self), set[int]()
            for path, module in self.named_modules():
                named = [(name, each) for name, each in module.named_parameters(recurse=False) if each.is_meta]
                # A tied parameter has the files' type when its second module is met.
                named = [(name, each) for name, each in named if each.dtype == dtype or id(each) in changed]
                named = [(name, each) for name, each in named if not _contains(f"{path}.{name}", exact)]
                for _, parameter in named:
                    if parameter.dtype == dtype and parameter.numel() >= _FEWEST:
                        parameter.data = parameter.data.to(types.get(tuple(parameter.shape), dtype))
                        changed.add(id(parameter))
                # All: the loader chooses one type for what it makes of one entry, by the first.
                if named:
                    setattr(module, _NAMES, tuple(name for name, _ in named))

    return named_as(OfFileTypes, model_class)


def _exact(model: Any) -> list[list[str]]:
    """Return what names of weights contain that a model keeps in float32 whatever its type."""
    patterns = [*(getattr(model, "_keep_in_fp32_modules", None) or ())]
    patterns += getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    return [re.findall(r"\w+", pattern) for pattern in patterns]


def _contains(name: str, exact: list[list[str]]) -> bool:
    return any(all(word in name for word in words) for words in exact)


def has_type(module: nn.Module, dtype: torch.dtype) -> bool:
    """Return whether a module's weight has this type, or will have it after `cast`."""
    return module.weight.dtype == dtype or "weight" in getattr(module, _NAMES, ())


def cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast what is left of weights that keep the files' type to the model's, one by one."""
    pages = host.FilePages()
    for module in model.modules():
        for name in module.__dict__.pop(_NAMES, ()):
            # Rounded experts take the weights from the module whose methods they use.
            parameter = getattr(module, name, None)
            if parameter is not None and parameter.dtype != dtype:
                parameter.data = _cast(parameter.data, dtype, pages)
    pages.end()


def _cast(weight: Tensor, dtype: torch.dtype, pages: host.FilePages) -> Tensor:
    if not weight.is_contiguous():
        return weight.to(dtype)
    made = torch.empty(weight.shape, dtype=dtype)
    for given, to in zip(weight.view(-1).split(_PIECE), made.view(-1).split(_PIECE), strict=True):
        to.copy_(given)
        pages.read(given.data_ptr(), given.nbytes)
    return made
