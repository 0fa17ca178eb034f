"""The folder: one file for each block of a prompt, named by the block's key, below a folder for each kind of model.

    FOLDER/3f0c.../a7/a7c4....safetensors
           |       |  the key, which covers all tokens and media up to the end of the block
           |       its first two digits
           what the numbers depend on: checkpoint, data types, layers, size of a block

A file holds the block's bytes and a hash over them, the key and the kind, so a file that was cut, damaged or renamed
is known as such. It is written under another name and then renamed, so it is there whole or not at all, and several
engines may write the same one. No lock is needed: files never change, and one that is gone means that its positions
are computed.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy
from blake3 import blake3

from beheld.core.errors import ConfigError
from beheld.core.kv_transfer import OPTION

SUFFIX = ".safetensors"
_PART = ".part"
# Of a process that ended while it wrote.
_STALE_S = 3600.0
# To what share of the bound files are removed, and the share that is written between two looks at the folder.
_DOWN_TO, _LOOK_AFTER = 0.9, 0.05
# Where a file's last use is newer, it is not noted again.
_NOTED_S = 60.0


class BrokenBlockError(Exception):
    """A file is there, and does not hold what its name says."""


@dataclass(frozen=True)
class _File:
    path: Path
    num_bytes: int
    used_s: float


class BlockFolder:
    """The files of one kind of model, and the bound of the whole folder.

    Args:
        root: the folder; made if it is missing.
        kind: what the numbers depend on, 32 hexadecimal digits or more.
        block_bytes: bytes of a block.
        max_bytes: about the most that all files of the folder, of all kinds, take together; None for no bound.

    Raises:
        ConfigError: the folder cannot be made or written.
    """

    def __init__(self, root: Path, kind: str, block_bytes: int, max_bytes: int | None = None) -> None:
        self.root = root
        self.kind = kind
        self.block_bytes = block_bytes
        self._max_bytes = max_bytes
        # What this process has written since it looked at the folder; the first time it looks at once.
        self._written: float = float("inf")
        try:
            (root / kind).mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"{OPTION}: the folder {str(root)!r} cannot be used: {error.strerror}.",
                "Name one that this user may write.",
                param=OPTION,
            ) from error

    def of_kind(self, kind: str) -> BlockFolder:
        """The same folder for another kind of model with as large blocks."""
        return self if kind == self.kind else BlockFolder(self.root, kind, self.block_bytes, self._max_bytes)

    def place(self, key: bytes) -> Path:
        """Where the block with this key lies."""
        name = key.hex()
        return self.root / self.kind / name[:2] / (name + SUFFIX)

    def holds(self, key: bytes) -> bool:
        """True if a file with this name is there."""
        return self.place(key).exists()

    def read(self, key: bytes) -> np.ndarray | None:
        """The bytes of a block, uint8; None if there is no such file.

        A file that cannot be used is removed, so that the block is written anew once it was computed.

        Raises:
            BrokenBlockError: it cannot be used; the text says why.
        """
        place = self.place(key)
        try:
            content = place.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise BrokenBlockError(f"{place.name} cannot be read: {error.strerror}") from error
        try:
            data = self._checked(key, content)
        except BrokenBlockError:
            with contextlib.suppress(OSError):
                place.unlink()
            raise
        self._note_use(place)
        return data

    def _checked(self, key: bytes, content: bytes) -> np.ndarray:
        name = key.hex() + SUFFIX
        try:
            tensors: dict[str, Any] = dict(safetensors.deserialize(content))
            data, check = (np.frombuffer(tensors[part]["data"], np.uint8) for part in ("block", "check"))
        except (safetensors.SafetensorError, KeyError, ValueError, TypeError) as error:
            raise BrokenBlockError(f"{name} is no file of a block, or was cut") from error
        if data.nbytes != self.block_bytes or bytes(check) != self._check(key, data):
            raise BrokenBlockError(f"{name} does not hold what its name says")
        return data

    def _check(self, key: bytes, data: np.ndarray) -> bytes:
        hashed = blake3(self.kind.encode())
        hashed.update(key)
        hashed.update(data.data)
        return hashed.digest()

    def _note_use(self, place: Path) -> None:
        """Files that were not used for long are removed first."""
        if self._max_bytes is None:
            return
        with contextlib.suppress(OSError):
            if time.time() - place.stat().st_mtime > _NOTED_S:
                os.utime(place)

    def write(self, key: bytes, data: np.ndarray) -> None:
        """Write a block's bytes, unless it is there.

        Raises:
            OSError: it cannot be written.
        """
        place = self.place(key)
        if place.exists():
            return
        content = safetensors.numpy.save(
            {"block": data, "check": np.frombuffer(self._check(key, data), np.uint8)}, {"key": key.hex()}
        )
        if self._max_bytes is not None:
            self._make_room(len(content), self._max_bytes)
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        part = place.with_name(f"{place.stem}.{secrets.token_hex(8)}{_PART}")
        try:
            part.write_bytes(content)
            part.replace(place)
        except OSError:
            with contextlib.suppress(OSError):
                part.unlink()
            raise

    def remove(self, keys: Sequence[bytes]) -> None:
        """Remove the files of these blocks."""
        for key in keys:
            with contextlib.suppress(OSError):
                self.place(key).unlink()

    # ---- the bound ---------------------------------------------------------------------------------------------------

    def _make_room(self, num_bytes: int, most: int) -> None:
        """Look at the folder now and then, and remove the files that were not used for longest."""
        self._written += num_bytes
        if self._written <= _LOOK_AFTER * most:
            return
        self._written = 0
        files = sorted(self._files(), key=lambda found: found.used_s)
        total = sum(found.num_bytes for found in files)
        # What is written until it looks again belongs to it.
        if total + num_bytes <= (1 - _LOOK_AFTER) * most:
            return
        for found in files:
            if total + num_bytes <= _DOWN_TO * most:
                break
            with contextlib.suppress(OSError):
                found.path.unlink()
            total -= found.num_bytes

    def _files(self) -> Iterator[_File]:
        """The files of blocks of all kinds; removes what processes left that ended while they wrote."""
        now = time.time()
        for folder, _, names in os.walk(self.root):
            for name in names:
                path = Path(folder, name)
                with contextlib.suppress(OSError):
                    state = path.stat()
                    if name.endswith(SUFFIX):
                        yield _File(path, state.st_size, state.st_mtime)
                    elif name.endswith(_PART) and now - state.st_mtime > _STALE_S:
                        path.unlink()
