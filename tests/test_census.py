"""The census tells what runs, what is refused and what is broken, and some text types that only it makes run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from beheld.checkpoint.info import read_info
from beheld.core.config import EngineArgs
from beheld.core.errors import ModelError
from tests import census

RUN = ("gpt2", "gpt_bigcode", "granite_swa", "lfm2_moe", "longcat_flash", "mimo_v2_flash", "mistral4", "youtu")


def known(kind: str) -> bool:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return kind in CONFIG_MAPPING


@pytest.mark.parametrize("kind", [kind for kind in RUN if known(kind)])
def test_these_run(kind: str) -> None:
    assert census.examine(kind) == census.Finding("run")


@pytest.mark.parametrize(
    ("kind", "said"),
    [("falcon", "FalconModel has no list `layers`"), ("diffllama", "do not call the attention hook once")],
)
def test_these_are_refused(kind: str, said: str) -> None:
    found = census.examine(kind)
    assert found.verdict == "refused"
    assert said in found.said


def test_other_answers_are_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    right = census.expected

    def wrong(model: Any, prompt: list[int]) -> tuple[list[int], torch.Tensor]:
        tokens, logits_NV = right(model, prompt)
        return tokens, logits_NV * 1.05

    monkeypatch.setattr(census, "expected", wrong)
    found = census.examine("llama")
    assert found.verdict == "broken"
    assert "a log-probability is off by" in found.said


def test_what_transformers_cannot_make_is_untried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(census.SIZES, "num_attention_heads", 7)
    assert census.examine("llama").verdict == "untried"


def test_a_process_that_dies_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(census, "_quietly", lambda kind, send: 1 / 0)
    assert census.apart("llama").verdict == "broken"


def test_the_status_tells_of_broken_ones(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    verdicts = {"a": census.Finding("run"), "b": census.Finding("refused", "why")}
    monkeypatch.setattr(census, "apart", verdicts.__getitem__)
    assert census.main(["a", "b"]) == 0
    assert capsys.readouterr().out == "run      a\nrefused  b: why\n1 refused, 1 run\n"
    verdicts["c"] = census.Finding("broken", "how")
    assert census.main(["a", "c"]) == 1


def test_an_indexer_is_refused(tmp_path: Path) -> None:
    config = census.tiny_config("deepseek_v3").to_dict() | {"index_topk": 16}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ModelError, match="An indexer of deepseek_v3"):
        read_info(tmp_path, EngineArgs())
