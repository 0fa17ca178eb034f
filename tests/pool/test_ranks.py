"""Poolers over ranks and stages give what one process gives; an encoder is whole on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from beheld import LLM
from beheld.core.errors import ConfigError
from beheld.executor.multi import MultiExecutor
from tests import ranks, tiny
from tests.long import LONG
from tests.pool.checkpoints import classifier, encoder

OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_model_len": 256, "max_num_seqs": 8}
RANKS: dict[str, Any] = {"distributed_executor_backend": "mp"}
PARTS, STAGES = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}
TEXTS = ["What is in this picture?", "A small red circle stands left of a large blue square. " * 2, "Hello"]
LABELS = {"id2label": {0: "calm", 1: "glad", 2: "sad"}, "label2id": {"calm": 0, "glad": 1, "sad": 2}}
BY_TOKENS = {"architectures": ["Qwen2ForSequenceClassification"], "classifier_from_token": ["n", "y"]}


@pytest.fixture(scope="module", autouse=True)
def forked() -> Iterator[None]:
    """All ranks of this module start quickly."""
    with ranks.forked():
        yield


def vectors(llm: LLM) -> list[Any]:
    return [output.outputs.embedding for output in llm.embed(TEXTS, use_tqdm=False)]


def classes(llm: LLM) -> list[Any]:
    return [output.outputs.probs for output in llm.classify(TEXTS, use_tqdm=False)]


def scores(llm: LLM) -> list[Any]:
    return [output.outputs.score for output in llm.score(TEXTS[2], TEXTS, use_tqdm=False)]


def qwen2(folder: Path) -> Path:
    return tiny.checkpoint("qwen2")


def three_classes(folder: Path) -> Path:
    return classifier("qwen2", folder, "Qwen2ForSequenceClassification", **LABELS)


KINDS: dict[str, tuple[Callable[[Path], Path], dict[str, Any], Callable[[LLM], list[Any]]]] = {
    "vectors": (qwen2, {"runner": "pooling"}, vectors),
    "classes": (three_classes, {}, classes),
    "tokens": (qwen2, {"hf_overrides": BY_TOKENS}, scores),
}
EVERY_TIME = [("vectors", STAGES), ("tokens", PARTS)]


@pytest.mark.parametrize(
    ("kind", "split"), [(kind, split) for kind in KINDS for split in (PARTS, STAGES)] if LONG else EVERY_TIME
)
def test_a_decoder_that_pools(tmp_path: Path, kind: str, split: dict[str, Any]) -> None:
    make, more, ask = KINDS[kind]
    folder = str(make(tmp_path / "checkpoint"))
    options = OPTIONS | {"max_num_batched_tokens": 48} | more
    with LLM(folder, **options) as llm:
        wanted = torch.tensor(ask(llm))
    with LLM(folder, **options, **RANKS, **split) as llm:
        assert isinstance(llm._live().core.executor, MultiExecutor)
        # The second time with prefix hits.
        for _ in range(2):
            torch.testing.assert_close(torch.tensor(ask(llm)), wanted, atol=2e-5, rtol=1e-4)


def test_an_encoder_is_whole_on_every_rank_and_has_no_stages(tmp_path: Path) -> None:
    folder = str(encoder(tmp_path / "e", "BertModel"))
    options = OPTIONS | {"max_model_len": 130}
    with LLM(folder, **options) as llm:
        wanted = torch.tensor(vectors(llm))
    with LLM(folder, **options, **RANKS, **PARTS) as llm:
        assert isinstance(llm._live().core.executor, MultiExecutor)
        assert torch.equal(torch.tensor(vectors(llm)), wanted)
    with pytest.raises(ConfigError, match="an encoder that makes vectors"):
        LLM(folder, **options, **RANKS, **STAGES)
