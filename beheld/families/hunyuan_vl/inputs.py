"""HunyuanOCR: an image's placeholder has a start and an end token, without which its positions are off by one.

Its card cuts off the end of a text of 8,000 characters or more that is one piece ten times. Here such an answer ends,
once the pieces are so many tokens that no page has them: ten empty cells in a row are no end of a table.
"""

from __future__ import annotations

from collections.abc import Mapping

from beheld.core.errors import PromptError
from beheld.core.repetition import RepetitionDetectionParams
from beheld.families.inputs import LAID_OUT, FamilyInputs

_START, _IMAGE, _END = (f"<｜hy_place▁holder▁no▁{number}｜>" for number in (100, 102, 101))
_PLACEHOLDER = _START + _IMAGE + _END


def rewrite(text: str, counts: Mapping[str, int]) -> str:
    """Return the text unchanged.

    Raises:
        PromptError: a placeholder lacks its start or end, which transformers' processor refuses too.
    """
    if text.count(_IMAGE) != text.count(_PLACEHOLDER):
        raise PromptError("An image placeholder lacks its start or end.", f"Write {_PLACEHOLDER!r} for each image.")
    return text


# Eight thousand characters are two thousand tokens of English, and more of Chinese.
REPETITION = RepetitionDetectionParams(max_pattern_size=128, min_count=10, after=2500, least=1500)
INPUTS = FamilyInputs(
    placeholders={"image": _PLACEHOLDER}, rewrite=rewrite, embedded={"image": LAID_OUT}, repetition=REPETITION
)
