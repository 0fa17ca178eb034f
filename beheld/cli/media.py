"""Media named on a command line: paths, URLs, and - for standard input."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from beheld.core.errors import FetchError, UserError
from beheld.core.media import MediaRef

IMAGE = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff"})
VIDEO = frozenset({".mp4", ".mov", ".mkv", ".webm", ".avi", ".m4v", ".mpg", ".mpeg", ".gif"})
# A part whose bytes say what it is.
_DOCUMENT = "file"
_IMAGE_BRANDS = frozenset((b"avif", b"avis", b"heic", b"heix", b"hevc", b"hevx", b"heim", b"heis", b"mif1", b"msf1"))
AUDIO = frozenset({".wav", ".mp3", ".flac", ".ogg", ".opus", ".m4a", ".aac"})


def references(names: Sequence[str], hint: str = "") -> list[MediaRef]:
    """Return one MediaRef per name; the file extension gives the modality, image if unknown.

    Args:
        names: files, URLs, or - for standard input.
        hint: what the error for a missing file says in addition.

    Raises:
        UserError: a file is missing, or standard input is named twice.
    """
    if list(names).count("-") > 1:
        raise UserError("Standard input can be named only once.")
    return [_reference(name, hint) for name in names]


def check_question(text: str) -> None:
    """Refuse a file in the question's place: the question was forgotten, and the model would answer a file's name.

    Raises:
        UserError: the text names a file.
    """
    # False, and no error, also where the system takes no such name: a question may be longer than any.
    if Path(text).suffix.lower() in IMAGE | VIDEO | AUDIO and os.path.isfile(text):
        raise UserError(
            f"There is no question: the last argument, {text!r}, is a file.",
            'Put the question after the media: beheld ask photo.jpg "What is this?"',
        )


def content(refs: Sequence[MediaRef]) -> list[dict[str, Any]]:
    """Return the parts of a chat message for these media; a GIF is a video if it has several frames."""
    kinds = [(_DOCUMENT if _may_move(ref) else ref.modality, ref.source) for ref in refs]
    return [{"type": kind, kind: source} for kind, source in kinds]


def _may_move(ref: MediaRef) -> bool:
    return isinstance(ref.source, Path) and ref.source.suffix.lower() == ".gif"


def _reference(name: str, hint: str) -> MediaRef:
    if name == "-":
        data = sys.stdin.buffer.read()
        if not data:
            raise FetchError("Standard input is empty.", "Pipe an image or a video into it.")
        return MediaRef(_sniff(data), data)
    modality = modality_of(name.split("?")[0])
    if name.startswith(("http://", "https://", "data:")):
        return MediaRef(modality, name)
    path = Path(name).expanduser()
    if not path.is_file():
        raise FetchError(
            f"{name!r} is a folder, not a file." if path.is_dir() else f"There is no file {name!r}.",
            f"Check the name. {hint}".rstrip(),
        )
    return MediaRef(modality, path)


def modality_of(name: str) -> str:
    """Return the modality of a file by its extension; image if unknown."""
    ending = Path(name).suffix.lower()
    if ending in VIDEO and ending != ".gif":
        return "video"
    return "audio" if ending in AUDIO else "image"


def _sniff(data: bytes) -> str:
    """Return the modality by the signature of a video or audio container; image for anything else."""
    if data[4:8] == b"ftyp":
        # HEIC and AVIF have the container of MP4.
        return "image" if data[8:12] in _IMAGE_BRANDS else "video"
    if data[:4] == b"\x1aE\xdf\xa3" or (data[:4] == b"RIFF" and data[8:12] == b"AVI "):
        return "video"
    if (data[:4] == b"RIFF" and data[8:12] == b"WAVE") or data[:4] in (b"fLaC", b"OggS") or data[:3] == b"ID3":
        return "audio"
    return "image"
