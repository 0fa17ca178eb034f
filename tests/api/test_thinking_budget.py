"""`thinking_token_budget` ends the reasoning of a conversation, and the model answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from beheld import LLM, SamplingParams
from beheld.core.errors import ParamsError
from beheld.core.structured_outputs import StructuredOutputs
from tests.compat import scripted

PIECES = ("<think>", "a", "b", "c", "d", "</think>", "answer")
TALK = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = Path(tmp_path_factory.mktemp("thinking"))
    scripted.write(folder, PIECES)
    with LLM(str(folder), dtype="float32", max_model_len=256, num_gpu_blocks_override=64, seed=0) as made:
        yield made


def params(budget: int | None, **more: object) -> SamplingParams:
    return SamplingParams(max_tokens=20, thinking_token_budget=budget, **more)  # type: ignore[arg-type]


def test_reasoning_ends_after_its_budget(llm: LLM) -> None:
    whole = "<think>abcd</think>answer"
    budgets = {None: whole, -1: whole, 4: whole, 9: whole, 2: "<think>ab</think>answer", 0: "<think></think>answer"}
    for temperature in (0.0, 0.7):
        asked = [params(budget, temperature=temperature) for budget in budgets]
        outputs = llm.chat([TALK] * len(budgets), asked, use_tqdm=False)
        assert [output.outputs[0].text for output in outputs] == list(budgets.values())


def test_reasoning_that_the_prompt_has_closed_has_none(llm: LLM) -> None:
    (output,) = llm.chat(TALK, params(1), use_tqdm=False, chat_template_kwargs={"enable_thinking": False})
    assert output.outputs[0].text == "<think>abcd</think>answer"


def test_no_limit_changes_no_grammar(llm: LLM) -> None:
    asked = [params(budget, structured_outputs=StructuredOutputs(choice=["a", "b"])) for budget in (None, -1)]
    plain, unlimited = llm.chat([TALK] * 2, asked, use_tqdm=False)
    assert plain.outputs[0].text in ("a", "b")
    assert unlimited.outputs[0].text == plain.outputs[0].text


def test_a_budget_is_that_of_its_own_conversation(llm: LLM) -> None:
    """A grammar without a budget shapes the whole answer, whatever the others of the call have."""
    asked = [params(None, structured_outputs=StructuredOutputs(choice=["a", "b"])), params(2)]
    outputs = llm.chat([TALK] * 2, asked, use_tqdm=False)
    assert outputs[0].outputs[0].text in ("a", "b")
    assert outputs[1].outputs[0].text == "<think>ab</think>answer"


def test_a_prompt_does_not_say_how_the_model_reasons(llm: LLM) -> None:
    with pytest.raises(ParamsError, match="thinking_token_budget needs a conversation"):
        llm.generate("Hi\n", params(2), use_tqdm=False)
    with pytest.raises(ParamsError, match="thinking_token_budget must"):
        params(-2)


def test_blanks_before_the_reasoning_do_not_lift_its_budget(tmp_path: Path) -> None:
    scripted.write(tmp_path, ("\n\n", *PIECES))
    with LLM(str(tmp_path), dtype="float32", max_model_len=256, num_gpu_blocks_override=64, seed=0) as made:
        outputs = made.chat([TALK] * 3, [params(2), params(0), params(9)], use_tqdm=False)
    assert [output.outputs[0].text for output in outputs] == [
        "\n\n<think>ab</think>answer",
        "\n\n<think></think>answer",
        "\n\n<think>abcd</think>answer",
    ]
