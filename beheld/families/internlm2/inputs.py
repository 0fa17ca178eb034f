"""InternLM2's tokenizer, which transformers does not have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from beheld.families.inputs import FamilyInputs


def read_tokenizer(path: Path) -> Any:
    """Make InternLM2's tokenizer; None for another, which transformers reads; see FamilyInputs.read_tokenizer."""
    from beheld.families._shared.internlm2.processing import read

    return read(path)


INPUTS = FamilyInputs(read_tokenizer=read_tokenizer)
