"""The requests that other implementations were asked; REFERENCE_ASKS of a tests/tiny_own_*.py adds a family's own."""

from __future__ import annotations

from tests import tiny
from tests.oracle import cases
from tests.oracle.cases import Ask

_IMAGES = {
    "one_image": cases.ONE,
    "other_image": cases.OTHER,
    "tall_image": Ask("{i}What is in this picture?", ((33, 97, 6),)),
    "wide_image": Ask("{i}Describe it.", ((224, 60, 9),)),
    "large_image": cases.LARGE,
    "two_images": cases.BETWEEN,
    "four_images": cases.FOUR,
}
_VIDEOS = {"video": cases.VIDEO, "odd_video": cases.ODD_VIDEO, "video_and_image": cases.VIDEO_AND_PICTURE}
_SOUNDS = {"sound": cases.HEARD, "sounds": cases.SOUNDS, "long_sound": cases.LONG_SOUND}


def asks(family: str) -> dict[str, Ask]:
    """Return the requests of a family by name: text, then media that it takes, then its own."""
    found = {"text": cases.SHORT, "long_text": cases.LONG}
    if family in tiny.IMAGE_FAMILIES:
        found |= _IMAGES
    if family in tiny.VIDEO_FAMILIES:
        found |= _VIDEOS
    if family in tiny.SOUND_FAMILIES:
        found |= _SOUNDS
    fitted = {name: cases.fit(family, ask)[0] for name, ask in found.items()}
    for module in tiny._OWN:
        fitted |= getattr(module, "REFERENCE_ASKS", {}).get(family, {})
    return fitted
