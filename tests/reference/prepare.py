"""Writes what a recorder in another environment reads: `python -m tests.reference.prepare FAMILY FOLDER`.

The folder then holds:

    checkpoint/   the family's tiny checkpoint
    cases.json    [{"name", "prompt", "images": [file], "videos": [file], "audios": [file], "max_tokens"}]
    *.png *.npy   the media that cases.json names; sounds are float32 at 16,000 samples per second
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from tests import tiny
from tests.oracle.cases import Ask
from tests.reference.cases import asks


def write(family: str, folder: Path) -> None:
    """Write the family's checkpoint, cases and media into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copytree(tiny.checkpoint(family), folder / "checkpoint", dirs_exist_ok=True)
    cases = [_case(family, name, ask, folder) for name, ask in asks(family).items()]
    (folder / "cases.json").write_text(json.dumps(cases, indent=1, ensure_ascii=False), encoding="utf-8")


def _case(family: str, name: str, ask: Ask, folder: Path) -> dict[str, Any]:
    files: dict[str, list[str]] = {"images": [], "videos": [], "audios": []}
    for number, image in enumerate(ask.pictures()):
        files["images"].append(f"{name}_{number}.png")
        image.save(folder / files["images"][-1])
    arrays = [("videos", clip.array) for clip in ask.videos] + [("audios", wave) for wave in ask.waves()]
    for number, (kind, array) in enumerate(arrays):
        files[kind].append(f"{name}_{kind}_{number}.npy")
        np.save(folder / files[kind][-1], array)
    return {
        "name": name,
        "prompt": ask.prompt(family),
        **files,
        "metadata": [clip.metadata for clip in ask.videos],
        "max_tokens": ask.max_tokens,
    }


def main() -> None:
    """Read the command line and write the folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("family")
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    write(options.family, options.folder)


if __name__ == "__main__":
    main()
