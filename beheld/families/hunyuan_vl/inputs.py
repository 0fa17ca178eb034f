"""HunyuanOCR: an image's placeholder has a start and an end token, without which its positions are off by one."""

from __future__ import annotations

from collections.abc import Mapping

from beheld.core.errors import PromptError
from beheld.families.inputs import LAID_OUT, FamilyInputs

_START, _IMAGE, _END = (f"<｜hy_place▁holder▁no▁{number}｜>" for number in (100, 102, 101))
_MARKER = _START + _IMAGE + _END


def rewrite(text: str, counts: Mapping[str, int]) -> str:
    """Return the text unchanged.

    Raises:
        PromptError: a placeholder lacks its start or end, which transformers' processor refuses too.
    """
    if text.count(_IMAGE) != text.count(_MARKER):
        raise PromptError("An image's placeholder lacks its start or its end.", f"Write {_MARKER!r} for each image.")
    return text


INPUTS = FamilyInputs(placeholders={"image": _MARKER}, rewrite=rewrite, embedded={"image": LAID_OUT})
