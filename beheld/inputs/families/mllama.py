"""Llama 3.2 Vision: a picture is one token; the start of the text stands behind the pictures that come first."""

from __future__ import annotations

from collections.abc import Mapping

from beheld.inputs.families import PLAIN_HOST_ONLY, PLAIN_LAYOUT, Family

_IMAGE = "<|image|>"
_START = "<|begin_of_text|>"


def rewrite(text: str, counts: Mapping[str, int]) -> str:
    """Put the start of the text, where it is missing, behind the pictures that stand first."""
    if _START in text:
        return text
    first = 0
    while text.startswith(_IMAGE, first):
        first += len(_IMAGE)
    return text[:first] + _START + text[first:]


FAMILY = Family(
    rewrite=rewrite,
    layout=PLAIN_LAYOUT | {"num_tiles"},
    host_only=PLAIN_HOST_ONLY | {"num_tiles"},
)
