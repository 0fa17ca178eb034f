"""DeepSeek-OCR 2: transformers' processor.

Its card leaves vLLM to its repository, which bans what would repeat 20 of the answer's last 90 tokens, but for the ends
of a table's cells.
"""

from __future__ import annotations

from beheld.core.repetition import NoRepeatWindow
from beheld.families.inputs import FamilyInputs

# `<td>` and `</td>`.
_CELLS = frozenset((128821, 128822))
INPUTS = FamilyInputs(no_repeat=NoRepeatWindow(20, 90, _CELLS))
