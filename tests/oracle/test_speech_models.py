"""Models that transcribe by a decoder of text: their answers equal transformers' own."""

from __future__ import annotations

import pytest

from tests import tiny
from tests.oracle import cases, reference
from tests.oracle.cases import Ask
from tests.oracle.test_oracle import check, make

FAMILIES = tuple(family for family in tiny.APART if family != "whisper")
# One audio to a prompt, as transformers' processors take it.
ASKS = (
    cases.HEARD,
    cases.HEARD_ELSE,
    cases.LONG_SOUND,
    Ask("{a}", sounds=((1.14, 30),), max_tokens=20),
    Ask("{a}Now.", sounds=((0.93, 31),)),
)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_checkpoint_is_fit_to_be_an_oracle(family: str) -> None:
    answers = [reference.answer(family, ask) for ask in ASKS]
    assert min(min(answer.gaps) for answer in answers) > 1e-3
    assert len({answer.token_ids[:4] for answer in answers}) == len(ASKS)


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_transformers(family: str) -> None:
    with make(family, cases.ROOMY | {"block_size": 8}) as llm:
        check(llm, family, ASKS[:1])
        check(llm, family, [*ASKS, cases.HEARD_OTHER])
        before = llm.stats().scheduler.prefix_hits
        check(llm, family, [cases.HEARD_ELSE])
        assert llm.stats().scheduler.prefix_hits > before
    with make(family, cases.ENGINES["cut"]) as llm:
        check(llm, family, ASKS[::-1])


def test_preempted_sequences_resume() -> None:
    family = FAMILIES[0]
    with make(family, cases.tight(family) | {"max_model_len": 256}) as llm:
        crowd = [Ask(f"{{a}}{n}?", sounds=((0.4, 40 + n),), max_tokens=36) for n in range(8)]
        check(llm, family, crowd)
        assert llm.stats().scheduler.num_preemptions > 0
