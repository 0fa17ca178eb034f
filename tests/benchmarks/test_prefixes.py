"""Ten questions about one image: those after the first take less processor time than without shared prefixes."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import prefixes


@pytest.mark.usefixtures("one_thread")
def test_a_hybrids_prefix_saves_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "QUESTIONS", 4)
    made = prefixes.measure("qwen3_5", tmp_path, 4, "cpu")
    assert made["found_apart"] == 0
    assert made["found_shared"] > 0.6 * made["prompt_tokens_shared"]
    assert made["next_ms_shared"] < 0.7 * made["next_ms_apart"]
