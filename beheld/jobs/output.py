"""The output of a job: one JSON line per item, whole or absent, each item once."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

from beheld.core.errors import ConfigError

# How every line begins; a file whose end does not begin so is not cut.
_START = b'{"id": "batch_req_'
# The fields that tell which item a line answers, without parsing the answer, which may be long.
_HEAD = re.compile(rb'\{"id": "batch_req_[0-9a-f]+", "custom_id": ("(?:[^"\\]|\\.)*"), ')


def key_of(custom_id: str | None, line: int = 0) -> bytes:
    """The 16-byte digest that identifies an item: of its custom_id, or of its line if it has no usable one.

    A set of a million digests takes 83 MB, whatever the length of the ids.
    """
    name = f"line {line}" if custom_id is None else f"id {custom_id}"
    return hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16).digest()


class OutputFile:
    """Appends lines to a file that only this process writes.

    A process that is killed while it writes leaves at most one unfinished line, at the end. Resuming cuts it, and its
    item is computed again.

    Args:
        path: the file.
        resume: the file may hold lines of an earlier run.

    Attributes:
        done: keys (see `key_of`) of the items that the file held at the start.

    Raises:
        ConfigError: the file cannot be opened, is in use, holds something although `resume` is not set, or holds
            something that no job wrote.
    """

    def __init__(self, path: Path, *, resume: bool) -> None:
        self._path = path
        self.done: set[bytes] = set()
        try:
            # Not truncated here: another job may be writing it.
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise ConfigError(
                f"The output {str(path)!r} cannot be opened: {error.strerror}.", "Name a file that can be written."
            ) from error
        try:
            self._lock()
            self._size = os.fstat(self._fd).st_size
            if self._size and not resume:
                raise ConfigError(
                    f"The output {str(path)!r} exists and is not empty.", "Add --resume, or name another file."
                )
            self._size = self._scan()
        except BaseException:
            os.close(self._fd)
            raise

    def append(self, line: dict[str, Any]) -> None:
        """Write one line.

        Raises:
            ConfigError: the file cannot be written (the disk is full); the file then ends with the line before.
        """
        left = memoryview(json.dumps(line).encode("ascii") + b"\n")
        size = len(left)
        try:
            while left:
                left = left[os.write(self._fd, left) :]
        except OSError as error:
            os.ftruncate(self._fd, self._size)
            raise ConfigError(
                f"The output {str(self._path)!r} cannot be written: {error.strerror}.",
                "Make room, and run the same command with --resume.",
            ) from error
        self._size += size

    def close(self) -> None:
        """Write what the system holds back to the disk, and let other jobs use the file."""
        try:
            os.fsync(self._fd)
        except OSError:
            # A pipe or a device; there is no disk.
            pass
        finally:
            os.close(self._fd)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(
                f"The output {str(self._path)!r} is being written by another job.", "Wait for it, or end it."
            ) from error

    def _scan(self) -> int:
        """Collect the keys, cut an unfinished last line, and return the size that is left."""
        size = 0
        with open(self._path, "rb") as file:
            for number, line in enumerate(file, 1):
                if line.endswith(b"\n"):
                    self.done.add(self._key(line, number))
                    size += len(line)
                elif line.startswith(_START) or _START.startswith(line):
                    os.ftruncate(self._fd, size)
                else:
                    raise self._foreign(number)
        return size

    def _key(self, line: bytes, number: int) -> bytes:
        found = _HEAD.match(line)
        try:
            if found is not None and line.endswith(b"}\n"):
                return key_of(json.loads(found[1]))
            whole = json.loads(line)
            return key_of(None, int(whole["error"]["line"]))
        except (ValueError, KeyError, TypeError) as error:
            raise self._foreign(number) from error

    def _foreign(self, number: int) -> ConfigError:
        return ConfigError(
            f"Line {number} of the output {str(self._path)!r} was not written by a job.", "Name another file."
        )
