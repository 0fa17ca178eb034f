"""Finds the fonts that text is printed in, on whatever machine this runs."""

import os
from functools import lru_cache
from pathlib import Path

from PIL import ImageFont

_SEARCH = ("/usr/share/fonts", "/usr/local/share/fonts", "/Library/Fonts")
# Symbol fonts, display variants that have no plain letters, and weights too thin to survive a small picture.
_UNFIT = ("symbol", "dingbat", "math", "display", "stix", "cmsy", "cmex", "cmmi", "cmr10", "cmtt", "cmb10", "cmss")
_UNFIT_TOO = ("thin", "hairline", "extralight", "d050000l", "z003", "emoji", "libertine_rz", "noto", "lastresort")


def _folders() -> list[Path]:
    folders = [Path(part) for part in os.environ.get("MOTE_FONTS", "").split(os.pathsep) if part]
    folders.append(Path(__file__).resolve().parents[2] / ".fonts")
    try:
        import matplotlib

        folders.append(Path(matplotlib.get_data_path()) / "fonts" / "ttf")
    except ImportError:
        pass
    return [*folders, *map(Path, _SEARCH)]


@lru_cache(maxsize=1)
def font_paths() -> tuple[str, ...]:
    """Paths of all usable fonts, one of each file name, sorted by name; empty where there is none at all.

    Folders: those of the variable MOTE_FONTS, `.fonts` beside the project, matplotlib's own, the system's.
    """
    by_name: dict[str, str] = {}
    for folder in _folders():
        if not folder.is_dir():
            continue
        for path in sorted(folder.rglob("*")):
            name = path.name.lower()
            fit = path.suffix.lower() in (".ttf", ".otf") and not any(word in name for word in _UNFIT + _UNFIT_TOO)
            if fit and path.stat().st_size > 10_000:
                by_name.setdefault(name, str(path))
    return tuple(by_name[name] for name in sorted(by_name))


@lru_cache(maxsize=512)
def load_font(path: str, em: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """The font at `path`, `em` pixels high; Pillow's built-in one where `path` is empty."""
    if not path:
        return ImageFont.load_default(em)
    return ImageFont.truetype(path, em)
