"""Reports of prompts come from logits a few rows at a time: the same numbers, and the layers run once."""

from __future__ import annotations

import os
from typing import Any

import pytest

from beheld import LLM, SamplingParams
from beheld.attention.context import current
from beheld.runner import runner as running
from tests import tiny

# Each of another way from the layers to the logits.
FAMILIES = [
    "llama",
    "llama4",
    "gemma4",
    "gemma3n",
    "qwen3_vl",
    "qwen2_audio",
    "mllama",
    "ernie4_5_vl_moe",
    "cohere2_vision",
]
if os.environ.get("BEHELD_LONG"):
    # An encoder's model has prompts of one token or two.
    FAMILIES = sorted(tiny.TINY.keys() - {"florence2"})


def test_logits_of_earlier_positions_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Named tokens are wanted at the last positions alone, as where a teacher scores an answer."""
    options: dict[str, Any] = {"dtype": "float32", "seed": 0, "max_model_len": 256, "max_num_batched_tokens": 16}
    options |= {"max_logprobs": -1}
    ids, start = list(range(200, 250)), 41
    named = [[token + 1, 7] for token in ids[start + 1 :]]
    with LLM(str(tiny.checkpoint("llama")), media_workers=0, **options) as llm:
        runner: Any = llm._run.core.executor.runner  # type: ignore[union-attr]
        everything = SamplingParams(max_tokens=0, prompt_logprobs=-1)
        (whole,) = llm.generate({"prompt_token_ids": ids}, everything, use_tqdm=False)
        logits, sizes = runner._adapter.logits, list[int]()

        def noted(hidden_SH: Any) -> Any:
            sizes.append(len(hidden_SH))
            return logits(hidden_SH)

        monkeypatch.setattr(runner._adapter, "logits", noted)
        params = SamplingParams(max_tokens=1, prompt_logprob_token_ids=named, prompt_logprob_start=start)
        (found,) = llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)
    # Those, and the one that gives the answer's token.
    assert sum(sizes) == len(named) + 1
    scores, report = found.prompt_token_id_logprobs, whole.prompt_logprobs
    assert scores is not None
    assert report is not None
    assert scores.shape == (len(named), 2)
    for found_row, row, entry in zip(scores.tolist(), named, report[start + 1 :], strict=True):
        assert entry is not None
        assert found_row == pytest.approx([entry[token].logprob for token in row], abs=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_pieces_give_what_the_whole_gives(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"dtype": "float32", "seed": 0, "max_num_seqs": 4, "media_workers": 0}
    options |= {"max_model_len": 256, "max_num_batched_tokens": 16, "enable_prefix_caching": False}
    prompts = [{"prompt_token_ids": list(range(200, 200 + n))} for n in (23, 9, 5)]
    params = [SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=k, logprobs=1) for k in (2, 0, None)]
    with LLM(str(tiny.checkpoint(family)), **options) as llm:
        runner: Any = llm._run.core.executor.runner  # type: ignore[union-attr]
        whole = llm.generate(prompts, params, use_tqdm=False)
        hidden, logits = runner._adapter.hidden, runner._adapter.logits
        calls: list[list[int]] = []

        def begun(embeds_TH: Any, positions_XT: Any) -> Any:
            calls.append([])
            return hidden(embeds_TH, positions_XT)

        def noted(hidden_SH: Any) -> Any:
            made = logits(hidden_SH)
            assert max(current().called.values()) == 1, "the layers ran once"
            calls[-1].append(len(hidden_SH))
            return made

        monkeypatch.setattr(runner._adapter, "hidden", begun)
        monkeypatch.setattr(runner._adapter, "logits", noted)
        monkeypatch.setattr(running, "PROMPT_ROWS", 3)
        cut = llm.generate(prompts, params, use_tqdm=False)
    assert max(len(sizes) for sizes in calls) > 5
    assert all(size <= 3 for sizes in calls for size in sizes)
    for one, other, count in zip(whole, cut, (23, 9, 0), strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        told, again = (output.prompt_logprobs or [] for output in (one, other))
        assert len(told) == len(again) == count
        for entry, same in zip(told[1:], again[1:], strict=True):
            assert entry is not None
            assert same is not None
            assert entry.keys() == same.keys()
            expected = [value.logprob for value in entry.values()]
            assert [value.logprob for value in same.values()] == pytest.approx(expected, abs=1e-5)
