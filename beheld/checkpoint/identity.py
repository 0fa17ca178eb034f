"""What a checkpoint is, by the content of its files, so that nothing computed of it is taken for another's."""

from __future__ import annotations

import json
import os
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

from blake3 import blake3

from beheld.checkpoint.gguf.folder import is_made
from beheld.checkpoint.weights import weight_files
from beheld.core.config import ModelInfo

# The hub's cache names a large file by its SHA-256, and links to it.
_BLOB = re.compile(r"[0-9a-f]{64}")
# Files that change how a model computes, next to its weights; what changes tokens alone changes no key or value.
_SMALL = ("*.json", "*.py")
_OF_TOKENS = re.compile(r"(tokenizer|tekken|vocab|added_tokens|special_tokens|generation_config|chat_template)")
_OF_HF_CONFIG = frozenset({"_name_or_path", "name_or_path"})


def identity(info: ModelInfo, hf_config: Any) -> str:
    """A digest of all that the model's keys and values depend on, apart from the engine's own decisions.

    Weights are read once, at the speed of the disk, unless they lie in the hub's cache, where their names say what they
    hold.

    Args:
        hf_config: transformers' configuration, with the user's changes.

    Raises:
        OSError: a file cannot be read.
    """
    folders = [Path(info.path), *(Path(one.path) for one in info.secondary)]
    said = [_of_folder(folder) for folder in folders]
    config = {name: value for name, value in hf_config.to_dict().items() if name not in _OF_HF_CONFIG}
    said.append([info.architecture, json.dumps(config, sort_keys=True, default=str)])
    return blake3(json.dumps(said).encode()).hexdigest()


def _of_folder(folder: Path) -> list[Any]:
    # The name of a folder that was made says what state the files were in that it stands for.
    own = [folder.name] if is_made(folder) else []
    weights = [[name, _content(folder / name)] for name in sorted(weight_files(folder))]
    small = sorted({file for pattern in _SMALL for file in folder.glob(pattern) if not _OF_TOKENS.match(file.name)})
    others = sorted(file for file in folder.glob("*/*.safetensors") if file.is_file())
    return [own, weights, [[file.relative_to(folder).as_posix(), _content(file)] for file in (*small, *others)]]


def _content(file: Path) -> str:
    real = Path(os.path.realpath(file))
    if _BLOB.fullmatch(real.name) and real.parent.name == "blobs":
        return real.name
    state = real.stat()
    return _hashed(str(real), state.st_size, state.st_mtime_ns)


@lru_cache(maxsize=1024)
def _hashed(file: str, size: int, changed_ns: int) -> str:
    return blake3(max_threads=blake3.AUTO).update_mmap(file).hexdigest()
