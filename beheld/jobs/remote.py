"""A job's input that is kept elsewhere, as s3://BUCKET/KEY, read through pyarrow, which Ray brings."""

from __future__ import annotations

import importlib
import io
import re
from collections.abc import Callable
from typing import BinaryIO

from beheld.core.errors import ConfigError, first_line

_KEY = re.compile(r"//[^/@]*@")


def is_remote(name: str) -> bool:
    """Return whether an input is named by an address, not by a path."""
    return "://" in name


def without_key(text: str) -> str:
    """Return a text without the keys of the addresses in it: s3://KEY:SECRET@BUCKET is s3://BUCKET."""
    return _KEY.sub("//", text)


def opener(address: str) -> tuple[Callable[[], BinaryIO], int]:
    """Return what opens the file at an address, and its size in bytes.

    Raises:
        ConfigError: pyarrow is not installed, has no such kind of storage, or there is no such file.
    """
    shown = without_key(address)
    try:
        fs = importlib.import_module("pyarrow.fs")
    except ImportError as error:
        raise ConfigError(
            f"To read {shown!r}, pyarrow is needed, which is not installed.",
            "Run: pip install 'beheld[ray]', or copy the file to this machine and name its path.",
        ) from error
    try:
        storage, path = fs.FileSystem.from_uri(address)
        found = storage.get_file_info(path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"The input {shown!r} cannot be read: {without_key(first_line(error))}.",
            "Name a file of JSON lines, as s3://BUCKET/KEY.",
        ) from error
    if found.type != fs.FileType.File:
        raise ConfigError(f"There is no file {shown!r}.", "Name a file of JSON lines; folders are searched here only.")
    return lambda: io.BufferedReader(storage.open_input_stream(path)), found.size
