"""Only tokens whose logits are wanted go through the whole last layer, and nothing else changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from beheld import LLM, SamplingParams
from beheld.models.surgery.operation import Changes
from beheld.models.surgery.parts import text_model
from tests import census, census_media, tiny

FAMILY = "llama"
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
PROMPTS = [{"prompt_token_ids": [5 + (7 * n + 3 * m) % 80 for n in range(m)]} for m in (90, 40, 3)]


def runner_of(llm: LLM) -> Any:
    assert llm._run is not None
    return llm._run.core.executor.runner  # type: ignore[attr-defined]


def answers(llm: LLM) -> list[tuple[int, ...]]:
    return [tuple(o.outputs[0].token_ids) for o in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


@pytest.fixture
def llm() -> Any:
    options = {"dtype": "float32", "seed": 0, "max_model_len": 256, "enable_prefix_caching": False}
    with LLM(str(tiny.checkpoint(FAMILY)), **options) as made:
        yield made


def test_the_last_layer_sees_the_wanted_tokens_alone(llm: LLM) -> None:
    runner = runner_of(llm)
    rows: dict[int, list[int]] = {}
    for index, layer in enumerate(text_model(runner._adapter.model).layers):
        layer.mlp.register_forward_hook(lambda _, given, __, i=index: rows.setdefault(i, []).append(given[0].shape[1]))
    told = answers(llm)
    last = max(rows)
    assert rows[0][0] == 133
    assert rows[last][0] == 3
    assert rows[0][1:] == rows[last][1:], "all that decodes goes through all layers"
    runner._adapter.tail_from = None
    assert answers(llm) == told
    assert rows[last][len(rows[0]) // 2] == 133, "without a tail, all tokens"


def test_layers_of_other_names_are_shortened(tmp_path: Path) -> None:
    """GPT-NeoX calls a layer's attention by that word."""
    census.make("gpt_neox", tmp_path)
    options = {"dtype": "float32", "seed": 0, "max_model_len": 256, "enable_prefix_caching": False}
    with LLM(str(tmp_path), **options) as llm:
        runner = runner_of(llm)
        rows: list[int] = []
        text_model(runner._adapter.model).layers[-1].mlp.register_forward_hook(
            lambda _, given, __: rows.append(given[0].shape[1])
        )
        told = answers(llm)
        assert rows[0] == 3
        runner._adapter.tail_from = None
        rows.clear()
        assert answers(llm) == told
        assert rows[0] == 133


def test_columns_that_are_read_before_the_layers_leave_the_last_one_short(tmp_path: Path) -> None:
    """Kosmos 2.5 adds an embedding of its own to an image's rows."""
    kind = "kosmos-2.5"
    recipe = census.RECIPES[kind]
    census_media.make(kind, recipe, tmp_path)
    options = {"dtype": "float32", "seed": 0, "enable_prefix_caching": False} | census_media.options(recipe)
    with LLM(str(tmp_path), **options) as llm:
        runner = runner_of(llm)
        rows: list[int] = []
        text_model(runner._adapter.model).layers[-1].ffn.register_forward_hook(
            lambda _, given, __: rows.append(given[0].shape[1])
        )
        asked = [census_media.request(recipe, [tiny.picture(84, 56, seed)]) for seed in (1, 2)]
        told = [output.outputs[0].token_ids for output in llm.generate(asked, GREEDY, use_tqdm=False)]
        assert rows[0] == 2
        runner._adapter.tail_from = None
        rows.clear()
        assert [output.outputs[0].token_ids for output in llm.generate(asked, GREEDY, use_tqdm=False)] == told
        assert rows[0] > 20


def test_no_tail_where_logits_of_a_prompt_are_wanted(llm: LLM) -> None:
    asked = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=1)
    first = llm.generate(PROMPTS[:1], asked, use_tqdm=False)[0]
    runner_of(llm)._adapter.tail_from = None
    second = llm.generate(PROMPTS[:1], asked, use_tqdm=False)[0]
    assert first.prompt_logprobs == second.prompt_logprobs
    assert first.prompt_logprobs is not None
    assert len(first.prompt_logprobs) == 90


def test_a_layer_that_cannot_be_shortened_runs_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    from beheld.models import hf

    shorten = hf.last_layer.shorten

    def of_a_strange_layer(layer: nn.Module, changes: Changes) -> None:
        shorten(layer, changes)
        inner = layer.forward
        layer.forward = lambda *a, **k: inner(*a, **k, logits_to_keep=torch.ones(1))  # type: ignore[method-assign]

    with LLM(str(tiny.checkpoint(FAMILY)), dtype="float32", seed=0, max_model_len=256) as plain:
        told = answers(plain)
        assert runner_of(plain)._adapter.tail_from is not None
    monkeypatch.setattr(hf.last_layer, "shorten", of_a_strange_layer)
    with LLM(str(tiny.checkpoint(FAMILY)), dtype="float32", seed=0, max_model_len=256) as strange:
        assert runner_of(strange)._adapter.tail_from is None
        assert answers(strange) == told


def test_a_layer_in_which_tokens_meet_before_attention_runs_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wanted token alone has other neighbours; tokens that are all the same would not tell."""
    from beheld.models import hf

    shorten = hf.last_layer.shorten

    def of_a_mixing_layer(layer: nn.Module, changes: Changes) -> None:
        inner = layer.forward
        layer.forward = lambda x, *a, **k: inner(x + x.roll(1, 1), *a, **k)  # type: ignore[method-assign]
        shorten(layer, changes)

    monkeypatch.setattr(hf.last_layer, "shorten", of_a_mixing_layer)
    for block_size in (16, 1):
        with LLM(
            str(tiny.checkpoint(FAMILY)), dtype="float32", seed=0, max_model_len=256, block_size=block_size
        ) as llm:
            assert runner_of(llm)._adapter.tail_from is None


def test_an_error_without_words_ends_no_start(monkeypatch: pytest.MonkeyPatch) -> None:
    from beheld.models import hf

    shorten = hf.last_layer.shorten

    def of_a_strict_layer(layer: nn.Module, changes: Changes) -> None:
        inner = layer.forward

        def forward(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if hidden_states.shape[1] == 1:
                raise AssertionError
            return inner(hidden_states, *args, **kwargs)

        layer.forward = forward  # type: ignore[method-assign]
        shorten(layer, changes)

    monkeypatch.setattr(hf.last_layer, "shorten", of_a_strict_layer)
    with LLM(str(tiny.checkpoint(FAMILY)), dtype="float32", seed=0, max_model_len=256) as llm:
        runner = runner_of(llm)
        assert runner._adapter.tail_from is None
        assert not any(layer.keys.any() for layer in runner.kv.values()), "nothing is left of it"


def test_a_layer_that_the_compiler_gives_up_later_is_still_shortened(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One row is compiled apart, and first comes when tails are tried."""
    from beheld.models import hf
    from beheld.models.surgery import compiled

    shorten = hf.last_layer.shorten

    def of_many_rows(plain: Any, **_: Any) -> Any:
        def run(layer: nn.Module, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if hidden_states.shape[1] == 1:
                raise torch._dynamo.exc.TorchDynamoException("no form for one row")
            return plain(layer, hidden_states, *args, **kwargs)

        return run

    def of_compiled(layer: nn.Module, changes: Changes) -> None:
        compiled.compile_layers([layer], changes)
        shorten(layer, changes)

    with LLM(str(tiny.checkpoint(FAMILY)), dtype="float32", seed=0, max_model_len=256) as plain:
        told = answers(plain)
    monkeypatch.setattr(torch, "compile", of_many_rows)
    monkeypatch.setattr(hf.last_layer, "shorten", of_compiled)
    with LLM(str(tiny.checkpoint(FAMILY)), dtype="float32", seed=0, max_model_len=256) as llm:
        assert caplog.text.count("runs as it is: no form for one row") == 1
        assert runner_of(llm)._adapter.tail_from is not None
        assert answers(llm) == told
