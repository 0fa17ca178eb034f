"""Checkpoints in parts, as vLLM's scripts save them with load_format="sharded_state".

vLLM writes each rank's own weights, fused and cut. Here the published tensors are written, under the name of the first
rank: any number of ranks reads them.
"""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from beheld.checkpoint.weights import PARTS, weight_files
from beheld.core.errors import ConfigError, ModelError

_LARGEST = 5 << 30


class ShardedStateLoader:
    """The name that scripts read of vLLM's loader.

    Attributes:
        DEFAULT_PATTERN, TP_ONLY_PATTERN: how the parts are called, in vLLM before 0.33 and since.
        PP_AND_TP_PATTERN: how vLLM calls those of stages; scripts only show it.
    """

    DEFAULT_PATTERN = "model-rank-{rank}-part-{part}.safetensors"
    TP_ONLY_PATTERN = DEFAULT_PATTERN
    PP_AND_TP_PATTERN = "model-pp-{pp_rank}-tp-{tp_rank}-part-{part}.safetensors"


def save(source: Path, target: Path, pattern: str | None = None, max_size: int | None = None) -> None:
    """Write the weights of the folder `source` into the folder `target`, part by part.

    Args:
        pattern: the parts' names, with {rank} and {part}; None for those of ShardedStateLoader.
        max_size: the most bytes of a part, or one tensor if that is larger; None for 5 GiB.

    Raises:
        ConfigError: parts of this name would not be found when they are loaded, or the folder holds others.
        ModelError: the weights are no safetensors.
    """
    from safetensors import safe_open
    from safetensors.torch import save_file

    called, most = pattern or ShardedStateLoader.DEFAULT_PATTERN, max_size or _LARGEST
    try:
        first, second = (called.format(rank=0, part=part) for part in (0, 1))
    except (LookupError, ValueError):
        first = second = called
    if first == second or not (fnmatch(first, PARTS) and fnmatch(second, PARTS)):
        raise ConfigError(
            f"Parts called {called!r} are not found when they are loaded, or replace each other.",
            f"Leave the pattern out; it is {ShardedStateLoader.DEFAULT_PATTERN!r}.",
            param="pattern",
        )
    if next(target.glob(PARTS), None) is not None:
        raise ConfigError(
            f"{target} holds parts already, which would be loaded together with the new ones.",
            "Give an empty folder, or remove them first.",
            param="path",
        )
    files = weight_files(source)
    if not files or not all(name.endswith(".safetensors") for name in files):
        raise ModelError(f"The weights in {source} are no safetensors.", "Convert the checkpoint first.")
    target.mkdir(parents=True, exist_ok=True)
    held: dict[str, Any] = {}
    size = number = 0

    def write() -> None:
        nonlocal size, number
        save_file(held, target / called.format(rank=0, part=number), {"format": "pt"})
        held.clear()
        size, number = 0, number + 1

    for name in files:
        with safe_open(source / name, "pt") as opened:
            for key in opened.keys():  # noqa: SIM118
                tensor = opened.get_tensor(key)
                if held and size + tensor.nbytes > most:
                    write()
                held[key] = tensor
                size += tensor.nbytes
    write()
