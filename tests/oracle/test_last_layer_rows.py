"""Layers that write no keys are run for the tokens whose logits are wanted, and for no others."""

from __future__ import annotations

from typing import Any

import pytest

from beheld import LLM, SamplingParams
from tests.oracle import cases
from tests.oracle.test_oracle import check, make, request

FAMILY = "gemma4"
MOST_SEQS = 2


def rows_by_layer(llm: LLM) -> list[list[int]]:
    """For each decoder layer, how many tokens each pass took through it; filled from now on."""
    text: Any = llm._run.core.executor.runner._adapter.model.model.language_model  # type: ignore[attr-defined]
    seen: list[list[int]] = [[] for _ in text.layers]
    for rows, layer in zip(seen, text.layers, strict=True):
        layer.mlp.register_forward_hook(lambda module, args, out, rows=rows: rows.append(args[0].shape[1]))
    return seen


@pytest.mark.parametrize("most", [2048, 32], ids=["whole", "cut"])
def test_prompts_stop_before_the_layers_that_read_the_cache_of_others(most: int) -> None:
    """Prompts that come while others decode, whole or in pieces, with and without a known prefix."""
    asks = cases.crowd(FAMILY)
    with make(FAMILY, {"max_num_batched_tokens": most, "max_num_seqs": MOST_SEQS}) as llm:
        seen = rows_by_layer(llm)
        check(llm, FAMILY, asks)
        check(llm, FAMILY, asks[:1] + asks[:1])
    writers, readers = seen[:2], seen[2:]
    assert writers[0] == writers[1]
    assert readers[0] == readers[1]
    pairs = list(zip(writers[0], readers[0], strict=True))
    assert max(writers[0]) > 8, "no pass of this test held a prompt"
    assert all(1 <= read <= min(wrote, MOST_SEQS) for wrote, read in pairs), pairs
    assert any(1 < read < wrote for wrote, read in pairs), "no prompt came while others decoded"


def test_all_tokens_go_on_where_their_log_probabilities_are_wanted() -> None:
    ask = cases.crowd(FAMILY)[0]
    with make(FAMILY, {}) as llm:
        seen = rows_by_layer(llm)
        told = llm.generate(
            request(FAMILY, ask), SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0), use_tqdm=False
        )[0]
        assert seen[0] == seen[-1] == [len(told.prompt_token_ids)]
        assert len(told.prompt_logprobs) == len(told.prompt_token_ids)
