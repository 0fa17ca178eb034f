"""The comparison of all families' speeds: shapes are enlarged, both engines answer, failures are rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import families, families_census
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
    assert families.enlarged({"n_embed": 8, "hidden_size": 8}, 2, ("hidden_size",), frozenset(("n_embed",))) == {
        "n_embed": 16,
        "hidden_size": 8,
    }


def test_a_checkpoint_is_made_anew_in_the_shape_asked_for(tmp_path: Path) -> None:
    families.make("llava", tmp_path / "llava", 2)
    made = json.loads((tmp_path / "llava" / "config.json").read_text(encoding="utf-8"))
    kept = json.loads((tiny.checkpoint("llava") / "config.json").read_text(encoding="utf-8"))
    assert made["text_config"]["hidden_size"] == 2 * kept["text_config"]["hidden_size"]
    assert made["vision_config"]["num_attention_heads"] == 2 * kept["vision_config"]["num_attention_heads"]
    # What is made later has its own shape again.
    families.make("llava", tmp_path / "again", 1)
    again = json.loads((tmp_path / "again" / "config.json").read_text(encoding="utf-8"))
    assert again == kept


def test_every_round_asks_of_other_media() -> None:
    first, second = (families.subject("llava").asks(4, turn) for turn in (0, 1))
    media = [image for ask in (*first, *second) for image in ask.images]
    assert len(set(media)) == 8


@pytest.mark.usefixtures("one_thread")
def test_both_engines_answer_and_a_family_that_fails_is_a_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make = families.make

    def make_one(family: str, folder: Path, scale: int) -> Any:
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


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("family", ["rwkv", "gpt2", "pix2struct", "whisper", "phi3_v", "minicpmv4_6", "step3p7"])
def test_every_kind_of_checkpoint_is_asked_in_batches(family: str, tmp_path: Path) -> None:
    """Types of text and of media that the census makes, transcripts, and processors that take one prompt."""
    speed = families.measure(family, tmp_path, requests=2, tokens=3, scale=2, rounds=1)
    assert speed.beheld > 0
    assert speed.transformers > 0


def test_every_type_that_runs_has_a_checkpoint() -> None:
    for family in families.families(None):
        assert families.subject(family) is not None


def test_inputs_of_several_prompts_are_one_batch() -> None:
    first, second = torch.tensor([[1, 2]]), torch.tensor([[3, 4]])
    parts = [{"ids": each, "sizes": [5], "delay": 6, "count": torch.tensor(7)} for each in (first, second)]
    made = families_census.joined(parts)
    assert made["ids"].tolist() == [[1, 2], [3, 4]]
    assert (made["sizes"], made["delay"], made["count"].item()) == ([5, 5], 6, 7)
    # Patches of images stand along one line where their grids are told.
    lines = [{"pixel_values": torch.zeros(1, 3, 14, 28), "target_sizes": torch.ones(1, 2)} for _ in range(2)]
    made = families_census.joined(lines)
    assert (made["pixel_values"].shape, made["target_sizes"].shape) == ((1, 3, 14, 56), (2, 2))


def test_families_that_are_not_tested_are_named() -> None:
    with pytest.raises(SystemExit, match="not a tested family: nosuch"):
        families.families("llava,nosuch")


@pytest.fixture
def one_thread() -> Any:
    """The benchmark sets the number of threads for its process; tests after this one get theirs back."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
