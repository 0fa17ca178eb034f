"""The comparison of all families' speeds: shapes are enlarged, both engines answer, failures are rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import families
from tests import tiny


def test_widths_and_heads_grow_and_nothing_else_does() -> None:
    config = {
        "hidden_size": 64,
        "vision_config": {"num_heads": [2, 4], "patch_size": 14, "intermediate_size": None},
        "tower": {"hidden_size": 32},
        "head_dim": 16,
        "vocab_size": 512,
    }
    assert families.enlarged(config, 3, fixed=("tower",)) == {
        "hidden_size": 192,
        "vision_config": {"num_heads": [6, 12], "patch_size": 14, "intermediate_size": None},
        "tower": {"hidden_size": 32},
        "head_dim": 16,
        "vocab_size": 512,
    }


def test_a_checkpoint_is_made_anew_in_the_shape_asked_for(tmp_path: Path) -> None:
    made = json.loads((families.make("llava", tmp_path / "llava", 2) / "config.json").read_text(encoding="utf-8"))
    kept = json.loads((tiny.checkpoint("llava") / "config.json").read_text(encoding="utf-8"))
    assert made["text_config"]["hidden_size"] == 2 * kept["text_config"]["hidden_size"]
    assert made["vision_config"]["num_attention_heads"] == 2 * kept["vision_config"]["num_attention_heads"]
    # What is made later has its own shape again.
    again = json.loads((families.make("llava", tmp_path / "again", 1) / "config.json").read_text(encoding="utf-8"))
    assert again == kept


def test_every_round_asks_of_other_media() -> None:
    first, second = (families.questions("llava", 4, 8, turn) for turn in (0, 1))
    media = [image for ask in (*first, *second) for image in ask.images]
    assert len(set(media)) == 8


@pytest.mark.usefixtures("one_thread")
def test_both_engines_answer_and_a_family_that_fails_is_a_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make = families.make

    def make_one(family: str, folder: Path, scale: int) -> Path:
        if family == "fuyu":
            raise ValueError("cannot be scaled\nbecause")
        return make(family, folder, scale)

    monkeypatch.setattr(families, "make", make_one)
    with pytest.raises(SystemExit) as ended:
        families.main(["--only", "llava,fuyu", "--requests", "2", "--tokens", "3", "--scale", "1", "--rounds", "1"])
    assert ended.value.code == 1
    lines = capsys.readouterr().out.splitlines()
    measured, failed = (json.loads(line) for line in lines[:2])
    assert measured["family"] == "llava"
    assert measured["beheld"] > 0
    assert measured["transformers"] > 0
    assert measured["ratio"] == pytest.approx(measured["beheld"] / measured["transformers"], rel=0.05, abs=0.02)
    assert failed == {"family": "fuyu", "failed": "ValueError: cannot be scaled"}
    assert lines[-1] == "| fuyu | not measured: ValueError: cannot be scaled | | |"


def test_families_that_are_not_tested_are_named() -> None:
    with pytest.raises(SystemExit, match="not a tested family: nosuch"):
        families.families("llava,nosuch")


@pytest.fixture
def one_thread() -> Any:
    """The benchmark sets the number of threads for its process; tests after this one get theirs back."""
    import torch

    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
