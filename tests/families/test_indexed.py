"""Models whose indexer picks positions answer as transformers does, up to as many as it picks, and refuse more."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from beheld import LLM, SamplingParams
from beheld.checkpoint.info import kv_groups
from beheld.core.config import EngineArgs
from beheld.core.errors import ConfigError, ModelError, PromptTooLongError
from beheld.engine.setup import resolve_and_decide
from beheld.families import page
from beheld.families._shared.indexed.model import INDEXED
from beheld.models.unread import UnreadModule
from tests import census

LIMIT, ANSWER = 32, 8
INDEXER = {"index_topk": LIMIT, "index_n_heads": 4, "index_head_dim": 16}
STRANGER = "model.layers.0.self_attn.stranger.weight"


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    logger = logging.getLogger("beheld")
    logger.addHandler(caplog.handler)
    with caplog.at_level(logging.INFO, "beheld"):
        yield caplog
    logger.removeHandler(caplog.handler)


def made(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """transformers' model of a tiny checkpoint with a small limit, which is written into the folder."""
    monkeypatch.setitem(census.PECULIAR, kind, census.PECULIAR.get(kind, {}) | INDEXER)
    model = census.make(kind, folder)
    file, changed = folder / "model.safetensors", folder / "changed.safetensors"
    save_file(load_file(file) | {STRANGER: torch.ones(2)}, changed, {"format": "pt"})
    changed.replace(file)
    return model


def indexers(model: Any) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "index_topk")]


@pytest.mark.parametrize("name", ["indexed_attention", "deepseek_sparse_attention"])
@pytest.mark.parametrize("kind", page.picking())
def test_layers_have_either_name(kind: str, name: str) -> None:
    """transformers before 5.18 has another name for them, in its configurations and where its models look up masks."""
    config = census.tiny_config(kind)
    usual = kv_groups(config, dense=True)
    config.layer_types = [name] * config.num_hidden_layers
    assert kv_groups(config, dense=True) == usual
    assert usual[0].values_in_keys
    assert INDEXED.keywords is not None
    mask = INDEXED.keywords(None, torch.arange(3)[None])["attention_mask"]
    assert mask[name].numel() == 0


@pytest.mark.parametrize("kind", page.picking())
def test_the_mask_has_the_installed_name(kind: str) -> None:
    assert INDEXED.keywords is not None
    mask = INDEXED.keywords(None, torch.arange(3)[None])["attention_mask"]
    assert set(census.tiny_config(kind).layer_types) <= set(mask)


@pytest.mark.parametrize("kind", page.picking())
def test_answers_equal_up_to_the_limit(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    model = made(kind, tmp_path, monkeypatch)
    prompt = census.prompts()[3][: LIMIT - ANSWER]
    picked: list[int] = []
    indexers(model)[0].register_forward_hook(lambda module, given, found: picked.append(found.shape[-1]))
    tokens, logits_NV = census.expected(model, prompt)
    # The last token of an answer is not computed with.
    assert picked == list(range(LIMIT - ANSWER, LIMIT))
    params = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True, logprobs=1)
    with LLM(str(tmp_path), dtype="float32", max_num_batched_tokens=16, block_size=8, disable_log_stats=True) as llm:
        (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        with pytest.raises(PromptTooLongError, match=f"length is {LIMIT} tokens, of which its indexer picks all"):
            llm.generate([{"prompt_token_ids": [5] * LIMIT}], params, use_tqdm=False)
        adapter = llm._live().core.executor.runner._adapter  # type: ignore[attr-defined]
        ours = adapter.model
        # The last layer takes the mask, too.
        assert adapter.tail_from == model.config.num_hidden_layers - 1
        assert not any("indexer" in name for name, _ in ours.named_parameters())
        assert sum(isinstance(module, UnreadModule) for module in ours.modules()) == model.config.num_hidden_layers
    assert output.outputs[0].token_ids == tokens
    for step, (token, logprobs) in enumerate(zip(tokens, output.outputs[0].logprobs, strict=True)):
        assert float(logits_NV[step].log_softmax(-1)[token]) == pytest.approx(logprobs[token].logprob, abs=1e-4)
    assert log.text.count(f"Of the 1024 positions of {tmp_path} the first {LIMIT} can be used") == 1
    assert f"1 weights of the checkpoint are unused, for example '{STRANGER}'" in log.text
    # With fewer positions than the prompt has, the answer is another: this indexer picks.
    for indexer in indexers(model):
        indexer.index_topk = 4
    assert (census.expected(model, prompt)[1][0] - logits_NV[0]).abs().max() > 0.1


def test_a_longer_limit_is_refused_with_the_reason(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    def decided(**options: Any) -> int:
        given = EngineArgs(str(tmp_path), device="cpu", dtype="float32", load_format="dummy", **options)
        return resolve_and_decide(given).config.max_model_len

    census.read("deepseek_v32", tmp_path)
    topk = {"index_topk": LIMIT}
    with pytest.raises(ConfigError, match=f"exceeds the {LIMIT} positions of .* of which its indexer picks all"):
        decided(hf_overrides=topk, max_model_len=LIMIT + 1)
    assert decided(hf_overrides=topk, max_model_len=LIMIT) == LIMIT
    # As long as the model's own length is less, it is the limit, and nothing is lowered.
    assert decided() == 1024
    assert "can be used" not in log.text
    with pytest.raises(ModelError, match="index_topk 0"):
        decided(hf_overrides={"index_topk": 0})
