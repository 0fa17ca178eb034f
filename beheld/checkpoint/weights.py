"""Which files of a checkpoint hold its weights, and which of them a folder lacks."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from fnmatch import fnmatch
from pathlib import Path

from beheld.checkpoint.files import CONFIG, read_json
from beheld.core.errors import ModelError

# In the order in which transformers' loader looks for them; each may be cut into shards, which an index names.
_WHOLE = ("model.safetensors", "pytorch_model.bin")
_INDEX = ".index.json"
# Parts that scripts of vLLM save; an index in their folder was copied and is that of the checkpoint before.
PARTS = "model-rank-*-part-*.safetensors"
_FIRST_RANK = "model-rank-0-part-*"
# Files to ignore: the publisher's own layout, which no class of transformers reads, and a trainer's state.
_OTHERS = ("consolidated*", "adapter_model*", "training_args*", "optimizer*", "scheduler*")
_ADAPTER_CONFIG = "adapter_config.json"
_ADAPTER = "adapter_model.safetensors"
_SHOWN = 4


def weight_files(path: Path) -> tuple[str, ...]:
    """The files of weights that a loader will read from the folder `path`, whether they are there or not.

    Returns:
        Names within the folder; none if nothing there is or names a file of weights.

    Raises:
        ModelError: an index cannot be read.
    """
    said = read_json(path / CONFIG).get("transformers_weights")
    if isinstance(said, str):
        return _shards(path / said) if said.endswith(_INDEX) else (said,)
    if in_parts(path):
        return _parts(path)
    for whole in _WHOLE:
        if (path / whole).is_file():
            return (whole,)
        if (path / f"{whole}{_INDEX}").is_file():
            return _shards(path / f"{whole}{_INDEX}")
    return _of_any_name(file.name for file in path.iterdir() if file.is_file()) if path.is_dir() else ()


def in_parts(path: Path) -> bool:
    """True if the folder's weights are parts that a script saved; transformers' loader does not know their names."""
    return next(path.glob(PARTS), None) is not None


def _parts(path: Path) -> tuple[str, ...]:
    names = sorted(file.name for file in path.glob(PARTS))
    if any(not fnmatch(name, _FIRST_RANK) for name in names):
        raise ModelError(
            f"{path} holds the weights of several ranks of another engine.",
            "Give the checkpoint that they were made of: ranks take their parts of it.",
        )
    return tuple(names)


def lacking(path: Path) -> tuple[str, ...]:
    """The files of weights that the folder's own indices and adapters speak of and that are not in it.

    A folder without any sign of weights lacks "model.safetensors".
    """
    files = weight_files(path) or _WHOLE[:1]
    adapters = (file.parent / _ADAPTER for file in path.glob(f"*/{_ADAPTER_CONFIG}"))
    bare = (file for file in adapters if next(file.parent.glob("adapter_model.*"), None) is None)
    absent = (name for name in files if not (path / name).is_file())
    return (*absent, *sorted(file.relative_to(path).as_posix() for file in bare))


def has_weights(path: Path) -> bool:
    """True if all files of the model's weights are in the folder; its adapters do not count."""
    files = weight_files(path)
    return bool(files) and all((path / name).is_file() for name in files)


def check_weights(path: Path, name: str) -> None:
    """Raise ModelError if files of weights are missing in the folder of the model `name`; it says which."""
    files = weight_files(path)
    if not files:
        raise ModelError(
            f"The folder of {name!r} holds no weights (*.safetensors).",
            "Fetch the checkpoint again, or try load_format='dummy' for random weights.",
        )
    absent = [file for file in files if not (path / file).is_file()]
    if absent:
        raise ModelError(
            f"Of the {len(files)} files that hold the weights of {name!r}, {len(absent)} are missing: {shown(absent)}.",
            "Fetch the checkpoint again: what is there stays, if it is fetched into the same folder.",
        )


# Where sentence-transformers keeps a layer after pooling.
_DENSE = "*_Dense/model.safetensors"


def chosen(names: Collection[str], path: Path) -> tuple[str, ...]:
    """Of a repository's files, those with the weights that a loader will read, and adapters and layers after pooling in
    folders of their own.

    Safetensors go before other forms, a whole file before shards; a publisher's own layout is never among them.

    Args:
        names: all files of the repository.
        path: the folder where its small files already lie.
    """
    further = (name for name in names if fnmatch(name, f"*/{_ADAPTER}") or fnmatch(name, _DENSE))
    return (*_of_model(names, path), *sorted(further))


def _of_model(names: Collection[str], path: Path) -> tuple[str, ...]:
    said = read_json(path / CONFIG).get("transformers_weights")
    if isinstance(said, str) and (not said.endswith(_INDEX) or (path / said).is_file()):
        return weight_files(path)
    for whole in _WHOLE:
        index = f"{whole}{_INDEX}"
        if whole in names:
            return (whole,)
        if index in names:
            stem, suffix = whole.rsplit(".", 1)
            by_name = sorted(name for name in names if fnmatch(name, f"{stem}-*.{suffix}"))
            return _shards(path / index) if (path / index).is_file() else (index, *by_name)
    return _of_any_name(names)


def shown(names: Collection[str]) -> str:
    """The first few names, and how many more there are."""
    first = ", ".join(list(names)[:_SHOWN])
    return first if len(names) <= _SHOWN else f"{first} and {len(names) - _SHOWN} more"


def _of_any_name(names: Iterable[str]) -> tuple[str, ...]:
    """Weights at the top of a checkpoint that go by no name that is known: safetensors, else what torch wrote."""
    top = sorted(name for name in names if "/" not in name and not any(fnmatch(name, other) for other in _OTHERS))
    for suffixes in ((".safetensors",), (".bin", ".pt", ".pth")):
        found = tuple(name for name in top if name.endswith(suffixes))
        if found:
            return found
    return ()


def _shards(index: Path) -> tuple[str, ...]:
    table = read_json(index).get("weight_map")
    files = list(table.values()) if isinstance(table, dict) else []
    if not files or not all(isinstance(file, str) for file in files):
        raise ModelError(f"{index.name} names no files of weights.", "Fetch the checkpoint again.")
    return tuple(sorted(set(files)))
