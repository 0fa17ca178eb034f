"""Shared and unshared prefixes are compared, of families of the oracle and of the census, with images and without."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import prefixes


@pytest.mark.parametrize(("family", "image"), [("lfm2_vl", True), ("nemotron_h_omni", True), ("nemotron_h", False)])
def test_questions_after_the_first_compute_what_is_new(family: str, image: bool, tmp_path: Path) -> None:
    """A short convolution, and Mamba-2 with images and without: states are found at the same place as blocks."""
    made = prefixes.measure(family, tmp_path, 1, "cpu", 400)
    assert made.image == image
    assert made.found_apart == 0
    # A block's rest, and what a template writes after every image.
    assert made.question <= made.computed <= made.question + 16 + (32 if image else 0)
    assert made.prompt > 400
    assert f"| {family} |" in prefixes.table([made])
