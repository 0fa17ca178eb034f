"""mote through the engine: 64 different scenes in one shuffled batch, each with its own answer, and a right one."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

from beheld import LLM, SamplingParams
from beheld.core.outputs import RequestOutput
from training.mote.evaluate import Case, sample_case

COUNT = 64
PARAMS = SamplingParams(temperature=0, max_tokens=200)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(max_model_len=2048, max_num_seqs=COUNT, seed=0) as made:
        yield made


@pytest.fixture(scope="module")
def scenes() -> list[Case]:
    return [sample_case("description", number) for number in range(COUNT)]


def messages(case: Case) -> list[dict[str, Any]]:
    content: list[dict[str, Any]] = [{"type": "image", "image": picture} for picture in case.pictures]
    return [{"role": "user", "content": [*content, {"type": "text", "text": case.exchange.question}]}]


def answers(outputs: list[RequestOutput]) -> list[str]:
    return [output.outputs[0].text for output in outputs]


def test_sixty_four_scenes_in_one_batch_each_get_their_own_answer(llm: LLM, scenes: list[Case]) -> None:
    order = list(range(COUNT))
    Random(3).shuffle(order)
    shuffled = answers(llm.chat([messages(scenes[i]) for i in order], PARAMS, use_tqdm=False))
    together = dict(zip(order, shuffled, strict=True))
    right = sum(together[i] == scenes[i].exchange.answer for i in range(COUNT))
    # Its card says how often mote is exactly right; a batch that mixes pictures up would leave next to nothing.
    assert right >= 0.8 * COUNT, f"{right} of {COUNT}"
    for i in range(0, COUNT, 4):
        llm.reset_prefix_cache()
        assert answers(llm.chat(messages(scenes[i]), PARAMS, use_tqdm=False)) == [together[i]]


def test_pictures_of_one_request_are_told_apart(llm: LLM) -> None:
    cases = [sample_case("several", number) for number in range(16)]
    conversations = [
        [
            {
                "role": "user",
                "content": [
                    *({"type": "image", "image": picture} for picture in case.pictures),
                    {"type": "text", "text": case.question},
                ],
            }
        ]
        for case in cases
    ]
    said = answers(llm.chat(conversations, PARAMS, use_tqdm=False))
    right = sum(text == case.exchange.answer for text, case in zip(said, cases, strict=True))
    assert right >= 12, f"{right} of 16"
