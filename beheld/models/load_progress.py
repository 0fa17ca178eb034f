"""A progress bar of checkpoint files while transformers loads weight by weight."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_FORM = "{desc}: {percentage:3.0f}% Completed | {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}]"


@contextmanager
def shard_bar(path: Path, *, shown: bool) -> Iterator[None]:
    """Within the block, replace transformers' progress bars by one of the *.safetensors files in `path`, or by none.

    It needs a terminal as standard error, and transformers' bars enabled.
    """
    from tqdm import tqdm
    from transformers.utils import logging as hf_logging

    shown = shown and sys.stderr.isatty() and hf_logging.is_progress_bar_enabled()
    file_by_name = _files(path) if shown else {}
    total = len(set(file_by_name.values()))
    # There are few shards: each is shown as soon as it is done.
    bar = tqdm(
        total=total, desc="Loading safetensors checkpoint shards", bar_format=_FORM, mininterval=0, disable=not total
    )

    def instead(make: Callable[..., Any], arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
        return _counted(arguments[0], file_by_name, bar.update)

    before = hf_logging.set_tqdm_hook(instead)
    try:
        yield
    finally:
        hf_logging.set_tqdm_hook(before)
        bar.close()


def _files(path: Path) -> dict[str, str]:
    """Return the file of each weight in the checkpoint."""
    from safetensors import safe_open

    found: dict[str, str] = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            found |= dict.fromkeys(opened.keys(), file.name)
    return found


def _counted(loading: Any, file_by_name: Mapping[str, str], done: Callable[[int], Any]) -> Iterator[Any]:
    """Iterate over transformers' parameters, and call `done` with the number of files newly complete.

    Args:
        loading: pairs of a parameter's name and its converter, which knows the checkpoint's weight names.
        file_by_name: of the checkpoint's weights. A file whose weights are all unused, or read under other names,
            counts as done from the start.
        done: called with a number above 0.
    """
    entries = list(loading)
    files = [[file_by_name[name] for name in _sources(entry) if name in file_by_name] for entry in entries]
    left = Counter(file for own in files for file in own)
    if unused := len(set(file_by_name.values()) - set(left)):
        done(unused)
    for entry, own in zip(entries, files, strict=True):
        yield entry
        left.subtract(own)
        if finished := sum(left[file] == 0 for file in set(own)):
            done(finished)


def _sources(entry: tuple[str, Any]) -> set[str]:
    """Return the checkpoint's weights that a parameter is made of."""
    return set().union(*getattr(entry[1], "layer_targets", {}).values())
