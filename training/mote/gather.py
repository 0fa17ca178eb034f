"""Collects photographs for `teach_unknown` out of unpacked packages: python -m training.mote.gather OUT FOLDER...

Each folder becomes a folder of OUT with its pictures, shrunk to at most 1280 pixels. WebP pictures inside Qt's resource
files (.rcc), where they lie as they are, become a folder for each such file. Pictures that are mere symbols, letters,
signs, flags or icons are left out by the names of their folders.
"""

import argparse
import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError

MOST = 1280
LEAST = 90
_ENDINGS = (".jpg", ".jpeg", ".png", ".webp")
_LEFT_OUT = ("symbols", "roadsigns", "flags", "icon", "toolbar", "logo", "screenshot", "desktop-base")
# A WebP picture of fewer bytes is a button or an ornament.
_LEAST_BYTES = 12_000


def inside(data: bytes) -> Iterator[bytes]:
    """The WebP files within other bytes."""
    start = data.find(b"RIFF")
    while start >= 0:
        if data[start + 8 : start + 12] == b"WEBP":
            yield data[start : start + 8 + int.from_bytes(data[start + 4 : start + 8], "little")]
        start = data.find(b"RIFF", start + 4)


def pictures(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Each picture's group and bytes."""
    for path in sorted(folder.rglob("*")):
        if not path.is_file() or any(word in str(path).lower() for word in _LEFT_OUT):
            continue
        if path.suffix == ".rcc":
            for data in inside(path.read_bytes()):
                if len(data) >= _LEAST_BYTES:
                    yield path.stem, data
        elif path.suffix.lower() in _ENDINGS:
            yield folder.name, path.read_bytes()


def main() -> None:
    """Write the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--only", nargs="*", default=(), help="groups to keep, where a folder has several")
    options = parser.parse_args()
    count = 0
    for folder in options.folders:
        for group, data in pictures(folder):
            if options.only and group not in options.only:
                continue
            try:
                opened = Image.open(io.BytesIO(data))
                opened.draft("RGB", (2 * MOST, 2 * MOST))
                image = opened.convert("RGBA")
            except (UnidentifiedImageError, OSError):
                continue
            if min(image.size) < LEAST:
                continue
            image.thumbnail((MOST, MOST))
            (options.out / group).mkdir(parents=True, exist_ok=True)
            if np.asarray(image)[..., 3].min() < 250:
                image.save(options.out / group / f"{count:04}.png")
            else:
                image.convert("RGB").save(options.out / group / f"{count:04}.jpg", quality=92)
            count += 1
    print(count)


if __name__ == "__main__":
    main()
