"""A platform that says no to everything runs whole engines, and its answers are the CPU's."""

from __future__ import annotations

from typing import Any

import pytest

from beheld import LLM, SamplingParams
from tests import tiny
from tests.oracle import cases
from tests.oracle.test_oracle import make, request
from tests.platform import stand_in

# Text, images, latents with experts, and states.
FAMILIES = ("llama", "qwen2_5_vl", "deepseek_v3", "qwen3_next")


def answers(family: str, llm: LLM) -> list[Any]:
    asks = cases.mixed(family)
    params = [SamplingParams(temperature=0, max_tokens=ask.max_tokens, ignore_eos=True) for ask in asks]
    outputs = llm.generate([request(family, ask) for ask in asks], params, use_tqdm=False)
    return [(tuple(each.prompt_token_ids), tuple(each.outputs[0].token_ids)) for each in outputs]


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_those_of_the_cpu(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {**cases.options(family, "overlap"), "device": "cpu"}
    with make(family, options) as llm:
        expected = answers(family, llm)
    plain = stand_in.register_plain(monkeypatch)
    with make(family, options) as llm:
        assert answers(family, llm) == expected
    assert plain.num_events > 0
    assert bool(plain.num_uploaded) == (family in tiny.IMAGE_FAMILIES)
