"""With adapters, our greedy answers equal those of transformers with peft, whoever shares the batch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from beheld import LLM, LoRARequest, SamplingParams
from tests import tiny
from tests.lora import adapters
from tests.lora.adapters import Adapter
from tests.oracle import cases
from tests.oracle.cases import Ask
from tests.oracle.test_oracle import request

ASKS = (cases.ONE, cases.SHORT, cases.BETWEEN, cases.LONG_ELSE, cases.ONE, cases.SHORT, cases.ONE)
ENGINES = {name: cases.ENGINES[name] for name in ("roomy", "cut", "overlap")}
FAMILIES = ("qwen2_5_vl", "llava", "llama")


def pair(family: str) -> tuple[Adapter, Adapter]:
    """Two that differ in rank, in layers, and in how they are scaled."""
    return Adapter(family, 1), Adapter(family, 2, 6, "q_proj|v_proj|down_proj", (("use_rslora", True),))


def requests_of(made: Sequence[Adapter], folder: Path) -> dict[Adapter | None, LoRARequest | None]:
    found: dict[Adapter | None, LoRARequest | None] = {None: None}
    for number, adapter in enumerate(made, 1):
        found[adapter] = LoRARequest(f"adapter {number}", number, adapters.write(adapter, folder / str(number)))
    return found


def make(family: str, **options: Any) -> LLM:
    given = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8} | options
    return LLM(str(tiny.checkpoint(family)), dtype="float32", seed=0, **cases.ROOMY | given)


def check(
    llm: LLM,
    family: str,
    asks: Sequence[Ask],
    wanted: Sequence[Adapter | None],
    loras: dict[Adapter | None, LoRARequest | None],
) -> None:
    """All in one call."""
    params = [SamplingParams(temperature=0, max_tokens=ask.max_tokens, ignore_eos=True, logprobs=1) for ask in asks]
    prompts = [request(family, ask) for ask in asks]
    outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=[loras[adapter] for adapter in wanted])
    for adapter, output, expected in zip(wanted, outputs, adapters.answers(wanted, family, asks), strict=True):
        got = output.outputs[0]
        assert tuple(got.token_ids) == expected.token_ids, adapter
        said = [step[token].logprob for step, token in zip(got.logprobs, got.token_ids, strict=True)]
        assert said == pytest.approx(expected.logprobs, abs=1e-4), adapter
        assert output.lora_request == loras[adapter]
    assert llm.stats().retried == 0


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_with_two_adapters_and_none(family: str, name: str, tmp_path: Path) -> None:
    first, second = pair(family)
    asks = ASKS if family != "llama" else tuple(ask for ask in ASKS if not ask.images)
    wanted = ([first, None, second, first, None, second, first] * 2)[: len(asks)]
    loras = requests_of((first, second), tmp_path)
    alone = [adapters.answer(adapter, family, asks[0]).token_ids for adapter in (None, first, second)]
    assert len(set(alone)) == 3, "adapters that change nothing prove nothing"
    with make(family, **ENGINES[name]) as llm:
        check(llm, family, asks, wanted, loras)
        # What was cached for one is no prefix of another's, and of its own it is.
        check(llm, family, asks, wanted[::-1], loras)
        before = llm.stats().scheduler.prefix_hits
        check(llm, family, asks, wanted, loras)
        assert llm.stats().scheduler.prefix_hits > before
        check(llm, family, asks, [None] * len(asks), loras)
