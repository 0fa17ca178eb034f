"""The comparison of shared and unshared prefixes runs, of families of the oracle and of the census."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import prefixes


@pytest.mark.parametrize("family", ["lfm2_vl", "nemotron_h_omni"])
def test_questions_after_the_first_find_the_image(family: str, tmp_path: Path) -> None:
    """A short convolution, and Mamba-2: states are found at the same place as blocks."""
    made = prefixes.measure(family, tmp_path, 1, "cpu")
    assert made["found_apart"] == 0
    assert made["found_shared"] > 0
    assert made["prompt_tokens_shared"] == made["prompt_tokens_apart"]
