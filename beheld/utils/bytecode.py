"""Keeps the bytecode of libraries that came without it, so that only the first start compiles their sources.

Images are often built so: packages are installed without bytecode (`pip install --no-compile`, `uv pip install`), and
PYTHONDONTWRITEBYTECODE, or a file system that is read only, keeps Python from writing it. Every start then compiles
some 4,000 modules of torch and transformers, which takes 7 of 12 seconds of imports.

Python's own way for this (`sys.pycache_prefix`) would leave aside what bytecode there is: half of such an image's, say.
"""

from __future__ import annotations

import contextlib
import importlib.util
import marshal
import os
import stat
import struct
import sys
from importlib.machinery import (
    BYTECODE_SUFFIXES,
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    SourceFileLoader,
    SourcelessFileLoader,
)
from pathlib import Path
from types import CodeType

from beheld.utils import env

# The largest of the libraries: what was done with it was done with the others.
_LIBRARY = "torch"


def keep_bytecode() -> Path | None:
    """Where it is needed, keep bytecode of all that is imported from now on in a folder of our own; the folder, or None.

    Nothing changes where torch has bytecode or Python can write it beside the sources, where the user has named a place
    (PYTHONPYCACHEPREFIX), or where the folder could be written by others: bytecode is code.
    """
    wanted = env.BYTECODE_CACHE()
    if wanted == "0" or sys.pycache_prefix is not None or not _is_missing():
        return None
    folder = Path(os.path.expanduser(wanted))
    if not _is_ours(folder):
        return None

    class Loader(_Loader):
        kept = folder

    kinds = ((ExtensionFileLoader, EXTENSION_SUFFIXES), (Loader, SOURCE_SUFFIXES))
    sys.path_hooks.insert(0, FileFinder.path_hook(*kinds, (SourcelessFileLoader, BYTECODE_SUFFIXES)))
    # Folders that were looked into before have the finders of before.
    sys.path_importer_cache.clear()
    return folder


class _Loader(SourceFileLoader):
    """Loads a module from bytecode beside its source, from that in `kept`, or from the source and keeps what it made."""

    kept: Path

    def get_code(self, fullname: str) -> CodeType | None:
        """The module's code; as with Python's own loaders, bytecode counts if it names the source's time and size."""
        beside = importlib.util.cache_from_source(self.path)
        if os.path.exists(beside):
            return super().get_code(fullname)
        place = self.kept / os.path.dirname(os.path.abspath(self.path)).lstrip(os.sep) / os.path.basename(beside)
        source = os.stat(self.path)
        numbers = (0, int(source.st_mtime) & 0xFFFFFFFF, source.st_size & 0xFFFFFFFF)
        header = importlib.util.MAGIC_NUMBER + struct.pack("<III", *numbers)
        with contextlib.suppress(OSError, EOFError, ValueError, TypeError):
            found = place.read_bytes()
            if found.startswith(header):
                code: CodeType = marshal.loads(memoryview(found)[len(header) :])
                return code
        made = super().get_code(fullname)
        with contextlib.suppress(OSError):
            place.parent.mkdir(parents=True, exist_ok=True)
            # Another process may be writing the same.
            own = place.with_name(f"{place.name}.{os.getpid()}")
            own.write_bytes(header + marshal.dumps(made))
            own.replace(place)
        return made


def _is_missing() -> bool:
    """True if the library's bytecode is not there, and will not be."""
    try:
        found = importlib.util.find_spec(_LIBRARY)
    except (ImportError, ValueError):
        return False
    if found is None or found.cached is None or os.path.exists(found.cached):
        return False
    return sys.dont_write_bytecode or not os.access(os.path.dirname(os.path.dirname(found.cached)), os.W_OK)


def _is_ours(folder: Path) -> bool:
    """True if this folder, made if need be, can be written by this user alone."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except OSError:
        return False
    ours = not hasattr(os, "getuid") or found.st_uid == os.getuid()
    return ours and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and os.access(folder, os.W_OK)
