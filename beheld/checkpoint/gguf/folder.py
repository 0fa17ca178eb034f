"""The folder that stands for a GGUF file: the other files of a checkpoint, made of the file's metadata and kept."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from beheld.checkpoint.files import CONFIG, GENERATION
from beheld.checkpoint.gguf.config import config_of, generation_config_of
from beheld.checkpoint.gguf.header import read_header
from beheld.checkpoint.gguf.projector import ADDED, files_of, vision_file_of
from beheld.checkpoint.gguf.tokenizer import templates, tokenizer_files
from beheld.core.errors import ModelError
from beheld.families import registry
from beheld.utils import env
from beheld.utils.log import get_logger

logger = get_logger(__name__)

# Folders outside the cache begin so.
_APART = "beheld-gguf-"
_SETTINGS = "tokenizer_config.json"
# Raise it when anything that is written changes: folders of another number are made anew.
_LAYOUT = 5


def described(file: Path, *, mmproj: str | None = None, with_tokenizer: bool = True) -> Path:
    """Return a folder that is read as any checkpoint's: its config.json names `file` as the one with the weights.

    It is made once for each state of the files, in the cache.

    Args:
        file: a GGUF file.
        mmproj: the file of the vision part; None for the one next to `file`, if there is one; "" for none.
        with_tokenizer: whether the file's own tokenizer is needed.

    Raises:
        ModelError: the file is broken, or holds a model that cannot be run; it says what to do.
    """
    # Links of the hub's cache lead to files whose names say nothing.
    file = Path(os.path.abspath(file))
    try:
        state = file.stat()
        vision = vision_file_of(file, mmproj)
        other = None if vision is None else vision.stat()
        said = (str(file), state.st_size, state.st_mtime_ns, with_tokenizer, _LAYOUT, str(vision)) + (
            () if other is None else (other.st_size, other.st_mtime_ns)
        )
        folder = Path(env.GGUF_CACHE()).expanduser() / hashlib.sha256(repr(said).encode()).hexdigest()[:32]
        if (folder / CONFIG).is_file():
            return folder
        made = _files(file, vision, with_tokenizer)
        return written(made, folder)
    except OSError as error:
        raise ModelError(f"{file.name} cannot be read: {error}.", "Check the file's permissions.") from error


def in_layout(folder: Path, layout: str) -> Path:
    """Return a folder that is read in place of a checkpoint's in a publisher's layout, with links to its weights.

    It is made once for each state of the folder's files, in the cache.

    Args:
        layout: its name; see families.registry.layouts.

    Raises:
        ModelError: a file is missing or broken, or describes what cannot be read.
    """
    folder = Path(os.path.abspath(folder))
    try:
        stats = [(path.name, path.stat()) for path in sorted(folder.iterdir()) if path.is_file()]
        states = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
        said = (str(folder), layout, _LAYOUT, states)
        made = Path(env.GGUF_CACHE()).expanduser() / hashlib.sha256(repr(said).encode()).hexdigest()[:32]
        return made if (made / CONFIG).is_file() else written(registry.layout_files(layout, folder), made)
    except OSError as error:
        raise ModelError(f"{folder} cannot be read: {error}.", "Check the files' permissions.") from error


def is_made(folder: Path) -> bool:
    """Whether a folder was made here, in place of a file or of another layout."""
    return folder.parent == Path(env.GGUF_CACHE()).expanduser() or folder.name.startswith(_APART)


def _files(file: Path, vision: Path | None, with_tokenizer: bool) -> dict[str, Any]:
    """Return the content of each file: a text, or what becomes JSON."""
    header = read_header(file)
    found: dict[str, Any] = {CONFIG: config_of(header, file), GENERATION: generation_config_of(header)}
    if vision is not None:
        found |= files_of(vision, header.metadata, found[CONFIG])
        found[CONFIG]["quantization_config"]["mmproj"] = str(vision)
    # What the vision part adds to the tokenizer.
    named, added = found.pop(_SETTINGS, {}), found.pop(ADDED, [])
    if not with_tokenizer:
        return found
    made = tokenizer_files(header, file, added)
    found |= made | {_SETTINGS: made[_SETTINGS] | named}
    for name, template in templates(header, file).items():
        place = "chat_template.jinja" if name == "default" else f"additional_chat_templates/{name}.jinja"
        found[place] = template
    return found


def written(files: dict[str, Any], folder: Path) -> Path:
    """Write the files into `folder`, which appears as a whole; other processes may make the same one.

    A file's content is a text, what becomes JSON, or the path that a link leads to.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=".draft-", dir=folder.parent))
    except OSError as error:
        draft = folder = Path(tempfile.mkdtemp(prefix=_APART))
        logger.warning("The cache cannot be written (%s); %s is used and stays after the end.", error, folder)
    for name, content in files.items():
        place = draft / name
        place.parent.mkdir(exist_ok=True)
        if isinstance(content, Path):
            place.symlink_to(content)
            continue
        place.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    if draft == folder:
        return folder
    try:
        os.rename(draft, folder)
    except OSError:
        shutil.rmtree(draft, ignore_errors=True)
        if not (folder / CONFIG).is_file():
            raise
    return folder
