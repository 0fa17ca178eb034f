"""What recorders of MiniCPM's published code share: how a prompt becomes slices, and what the model sees of them."""

from __future__ import annotations

import importlib
import importlib.machinery
import re
import sys
import types
from pathlib import Path
from typing import Any

import published

MARKS = re.compile(r"\(<(image|video)>\./</\1>\)")
_TOKENS = {
    "im_start": "<image>",
    "im_end": "</image>",
    "slice_start": "<slice>",
    "slice_end": "</slice>",
    "im_id_start": "<image_id>",
    "im_id_end": "</image_id>",
}
# Slices, and rows and columns of patches of each.
Item = tuple[list[Any], list[tuple[int, ...]]]


def modules(code: Path, *names: str) -> list[types.ModuleType]:
    """Import modules of the folder `code` as those of a package."""
    import torch

    package = types.ModuleType(published.PACKAGE)
    package.__path__ = [str(code)]
    sys.modules[published.PACKAGE] = package
    # It takes all names of torch.nn.functional, which has since come to export its functions alone.
    known = {name: value for name, value in vars(torch.nn.functional).items() if not name.startswith("__")}
    run("resampler", (code / "resampler.py").read_text(encoding="utf-8"), known)
    return [importlib.import_module(f"{published.PACKAGE}.{name}") for name in names]


def run(name: str, source: str, known: dict[str, Any] | None = None) -> types.ModuleType:
    """Run a module of the package from its source, with the names of `known` defined."""
    full = f"{published.PACKAGE}.{name}"
    module = types.ModuleType(full)
    module.__spec__ = importlib.machinery.ModuleSpec(full, None)
    module.__package__ = published.PACKAGE
    module.__dict__.update(known or {})
    sys.modules[full] = module
    exec(compile(source, full, "exec"), module.__dict__)
    return module


def name_tokens(tokenizer: Any, bos: bool) -> None:
    """Give a tokenizer the attributes that the published one has."""
    for name, token in _TOKENS.items():
        setattr(tokenizer, name, token)
        setattr(tokenizer, f"{name}_id", tokenizer.convert_tokens_to_ids(token))
    tokenizer.bos_id, tokenizer.add_bos_token = tokenizer.bos_token_id, bos


def lay_out(part: Any, case: dict[str, Any], folder: Path) -> tuple[str, list[Item]]:
    """Return a case's prompt with the tokens of its slices, and the slices of its images and videos.

    Frames are images without a number that are not cut, as the published code's users pass them.
    """
    import numpy as np
    import torch
    from PIL import Image

    images = [Image.open(folder / name).convert("RGB") for name in case["images"]]
    videos = [np.load(folder / name) for name in case["videos"]]
    text, number = "", 0
    items: list[Item] = []
    for index, piece in enumerate(MARKS.split(case["prompt"])):
        if not index % 2:
            text += piece
            continue
        frames = [images[number]] if piece == "image" else [Image.fromarray(frame) for frame in videos.pop(0)]
        options = {} if piece == "image" else {"max_slice_nums": 1}
        slices, grids = [], []
        for frame in frames:
            made = part.preprocess([frame], **options)
            slices += [torch.as_tensor(one) for one in flat(made["pixel_values"])]
            grids += [tuple(int(side) for side in size) for size in np.reshape(made["tgt_sizes"], (-1, 2))]
            if piece == "video":
                text += part.get_slice_image_placeholder(frame.size, 0, 1, False)
            elif hasattr(part, "use_image_id"):
                text += part.get_slice_image_placeholder(frame.size, number)
            else:
                text += part.get_slice_image_placeholder(frame.size)
        items.append((slices, grids))
        number += piece == "image"
    return text, items


def flat(nested: Any) -> list[Any]:
    """Return the arrays in lists of lists."""
    return [one for part in nested for one in flat(part)] if isinstance(nested, list) else [nested]


def patches(slices: list[Any], side: int) -> Any:
    """Return all patches (count, 3, side, side) of slices (3, side, patches in a row) or (3, height, width)."""
    import torch

    found = []
    for one in slices:
        grid = one.unflatten(2, (-1, side)).unflatten(1, (-1, side))
        found.append(grid.permute(1, 3, 0, 2, 4).flatten(0, 1))
    return torch.cat(found)


def seen(items: list[Item], side: int, embeds: list[Any]) -> dict[str, Any]:
    """Return what is recorded of a case with images or videos; `embeds` as the published model keeps them."""
    import torch

    if not items:
        return {}
    return {
        "sizes": [list(size) for _, grids in items for size in grids],
        "pixels": published.probe(patches([one for slices, _ in items for one in slices], side)),
        "embeds": published.probe(torch.cat([part.flatten(0, -2) for part in embeds if len(part)])),
    }
