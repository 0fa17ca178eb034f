"""Prefixes of models with recurrent layers: shared at the edges of media and of turns, and then computed by nobody."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from beheld import LLM, SamplingParams
from tests import tiny
from tests.oracle import cases, reference
from tests.oracle.cases import Ask
from tests.oracle.test_oracle import check, make

BLOCK = 8
QUESTIONS = ("What is in this picture?", "Where is the square?", "How many shapes are there?", "Hi!", "What moves?")
ASKS = tuple(
    Ask(f"{{i}}{text}{more}", ((224, 145, 1),), max_tokens=3) for more in ("", " Answer!") for text in QUESTIONS
)


@pytest.fixture(scope="module", params=[False, True], ids=["in_step", "overlap"])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with make("qwen3_5", cases.ROOMY | {"block_size": BLOCK, "async_scheduling": request.param}) as made:
        yield made


def test_of_ten_questions_about_an_image_nine_compute_only_the_question(llm: LLM) -> None:
    ids = [reference.answer("qwen3_5", ask).prompt_ids for ask in ASKS]
    token = reference.image_token("qwen3_5")
    stop = len(ids[0]) - ids[0][::-1].index(token)
    before = llm.stats().scheduler
    for number, ask in enumerate(ASKS):
        hits = llm.stats().scheduler.prefix_hits
        check(llm, "qwen3_5", [ask])
        found = llm.stats().scheduler.prefix_hits - hits
        computed = len(ids[number]) - found
        # Of the image at most what is left of a block.
        assert number == 0 or computed <= len(ids[number]) - stop + BLOCK - 1
        assert number == 0 or computed < len(ids[number]) // 2
    assert llm.stats().scheduler.num_encoded - before.num_encoded == 1


def test_the_next_turn_computes_what_is_new(llm: LLM) -> None:
    text = tiny.wrap("qwen3_5", "How many shapes are there?")
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    (first,) = llm.generate([text], params, use_tqdm=False)
    answer = list(first.outputs[0].token_ids)
    talk = [*first.prompt_token_ids, *answer, *range(40, 50)]
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    (second,) = llm.generate([{"prompt_token_ids": talk}], params, use_tqdm=False)
    known = len(talk) - 10 - 1
    assert second.num_cached_tokens == known // BLOCK * BLOCK
    llm.reset_prefix_cache()
    (again,) = llm.generate([{"prompt_token_ids": talk}], params, use_tqdm=False)
    assert again.num_cached_tokens == 0
    assert again.outputs[0].token_ids == second.outputs[0].token_ids
