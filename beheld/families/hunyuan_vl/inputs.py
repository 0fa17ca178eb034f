"""HunyuanOCR: an image's placeholder stands between a start and an end, without which its positions are off by one."""

from __future__ import annotations

from collections.abc import Mapping

from beheld.core.errors import PromptError
from beheld.families.inputs import LAID_OUT, FamilyInputs

_START, _IMAGE, _END = (f"<｜hy_place▁holder▁no▁{number}｜>" for number in (100, 102, 101))
_MARKER = _START + _IMAGE + _END


def rewrite(text: str, counts: Mapping[str, int]) -> str:
    """The text as it is.

    Raises:
        PromptError: a placeholder stands bare, as transformers' processor refuses it too.
    """
    if text.count(_IMAGE) != text.count(_MARKER):
        raise PromptError("A picture's marker lacks its start or its end.", f"Write {_MARKER!r} for each picture.")
    return text


INPUTS = FamilyInputs(placeholders={"image": _MARKER}, rewrite=rewrite, embedded={"image": LAID_OUT})
