"""Answers under a grammar follow it, whatever shares the batch; wrong grammars are refused soon."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest

from beheld import LLM, SamplingParams
from beheld.core.errors import ParamsError
from beheld.core.structured_outputs import StructuredOutputs
from tests import tiny

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "green"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 20},
        "flags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["colour", "count", "flags"],
    "additionalProperties": False,
}
ENGINES: dict[str, dict[str, Any]] = {
    "plain": {},
    "overlap": {"async_scheduling": True},
    "tight": {"num_gpu_blocks_override": 26, "max_num_batched_tokens": 16, "block_size": 4, "max_model_len": 96},
}


@pytest.fixture(scope="module", params=sorted(ENGINES))
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    """Engines that plan in different ways."""
    with LLM(str(tiny.checkpoint("qwen2_vl")), dtype="float32", seed=0, **ENGINES[request.param]) as found:
        yield found


def under(temperature: float = 3.0, **grammar: Any) -> SamplingParams:
    return SamplingParams(
        temperature=temperature,
        top_k=0,
        top_p=1.0,
        max_tokens=80,
        seed=1,
        structured_outputs=StructuredOutputs(**grammar),
    )


def check_schema(text: str) -> None:
    found = json.loads(text)
    assert set(found) == set(SCHEMA["required"])
    assert found["colour"] in ("red", "green")
    assert 0 <= found["count"] <= 20
    assert len(found["flags"]) <= 2


def test_answers_follow_their_grammars_beside_others(llm: LLM) -> None:
    free = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    prompts = ["one", "two", "three", "four", "five", "six"]
    params = [
        under(json=SCHEMA),
        free,
        under(regex=r"[a-c]{3}-\d\d"),
        under(choice=["yes", "no way"]),
        free,
        under(json=SCHEMA),
    ]
    alone = llm.generate(["two", "five"], free, use_tqdm=False)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    texts = [output.outputs[0].text for output in outputs]
    check_schema(texts[0])
    check_schema(texts[5])
    assert re.fullmatch(r"[a-c]{3}-\d\d", texts[2])
    assert texts[3] in ("yes", "no way")
    assert [texts[1], texts[4]] == [output.outputs[0].text for output in alone]
    assert all(outputs[k].outputs[0].finish_reason == "stop" for k in (0, 2, 3, 5))


def test_every_answer_of_n_follows_it_and_they_differ(llm: LLM) -> None:
    params = under(regex=r"[a-z]{8}")
    params.n = 4
    (output,) = llm.generate("x", params, use_tqdm=False)
    texts = [answer.text for answer in output.outputs]
    assert all(re.fullmatch(r"[a-z]{8}", text) for text in texts)
    assert len(set(texts)) > 1
    (again,) = llm.generate("x", params, use_tqdm=False)
    assert [answer.text for answer in again.outputs] == texts


def test_114_a_choice_that_is_one_long_run_of_emoji_is_followed_or_refused(llm: LLM) -> None:
    for count, end in ((4, "stop"), (5000, "length")):
        params = under(choice=["😀" * count])
        params.max_tokens = 20
        (output,) = llm.generate("x", params, use_tqdm=False)
        text = output.outputs[0].text
        assert output.outputs[0].finish_reason == end
        assert set(text) == {"😀"}
        assert len(text) == 4 or end == "length"
    with pytest.raises(ParamsError, match="has more than"):
        llm.generate("x", under(choice=["😀" * 20_000]), use_tqdm=False)


def test_the_end_comes_even_where_ends_are_ignored(llm: LLM) -> None:
    params = under(choice=["yes"])
    params.ignore_eos = True
    (output,) = llm.generate("x", params, use_tqdm=False)
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("yes", "stop")


def test_logprobs_and_length_under_a_grammar(llm: LLM) -> None:
    params = under(regex=r"a{50}", temperature=0.0)
    params.logprobs = 2
    params.max_tokens = 5
    (output,) = llm.generate("x", params, use_tqdm=False)
    assert output.outputs[0].finish_reason == "length"
    assert set(output.outputs[0].text) == {"a"}
    assert len(output.outputs[0].logprobs or []) == 5


BAD: dict[str, dict[str, Any]] = {
    "open bracket": {"regex": "[a-"},
    "no schema": {"json": '{"type": "objekt"}'},
    "not json": {"json": "{"},
    "remote reference": {"json": {"$ref": "http://127.0.0.1/x.json"}},
    "file reference": {"json": {"properties": {"x": {"$ref": "file:///etc/passwd"}}}},
    "deep": {"json": "[" * 5000 + "]" * 5000},
    "no rule": {"grammar": "start: nothing"},
    "nothing to choose": {"choice": []},
    "two": {"regex": "a", "choice": ["a"]},
    "none": {},
    "huge": {"regex": "a" * 200_000},
}


@pytest.mark.parametrize("name", sorted(BAD))
def test_wrong_grammars_are_refused(llm: LLM, name: str) -> None:
    begin = time.perf_counter()
    with pytest.raises(ParamsError) as refusal:
        llm.generate("x", under(**BAD[name]), use_tqdm=False)
    assert refusal.value.param == "structured_outputs"
    assert time.perf_counter() - begin < 2.0


SQL = """
root ::= "SELECT " column " from " table condition?
column ::= "col_1" | "col_2"
table ::= ("a" | "b")
condition ::= " where " column " = " [0-9]
"""


def test_a_grammar_as_other_engines_write_it_is_followed(llm: LLM) -> None:
    (output,) = llm.generate("x", under(grammar=SQL), use_tqdm=False)
    found = r"SELECT col_[12] from [ab]( where col_[12] = [0-9])?"
    assert re.fullmatch(found, output.outputs[0].text), output.outputs[0].text
    (output,) = llm.generate("x", under(grammar='root ::= "yes" | "no"'), use_tqdm=False)
    assert output.outputs[0].text in ("yes", "no")


def test_one_that_cannot_be_turned_is_told_of_this_form(llm: LLM) -> None:
    for text in (r'root ::= "\["', 'root ::= "a"\n' + "".join(f'r{n} ::= "b"\n' for n in range(1000))):
        with pytest.raises(ParamsError, match=r"not as GBNF: start: \"yes\" \| \"no\""):
            llm.generate("x", under(grammar=text), use_tqdm=False)
    with pytest.raises(ParamsError) as refusal:
        llm.generate("x", under(grammar='start: "::=" nothing'), use_tqdm=False)
    assert "GBNF" not in str(refusal.value)
    # What is told works.
    (output,) = llm.generate("x", under(grammar='start: "yes" | "no"'), use_tqdm=False)
    assert output.outputs[0].text in ("yes", "no")


@pytest.mark.parametrize("regex", [r"(a+)+b", r"(a|a)*c", r"(x{1,100}){1,100}y", r"(.*)*=", r"((a{1,50}){1,50}){1,50}"])
def test_44_regexes_that_run_away_elsewhere_do_not_here(llm: LLM, regex: str) -> None:
    begin = time.perf_counter()
    try:
        (output,) = llm.generate("x", under(regex=regex), use_tqdm=False, on_error="return")
    except ParamsError:
        output = None
    assert time.perf_counter() - begin < 10.0
    assert output is None or output.error is not None or output.outputs


def test_45_recursive_schemas_are_followed(llm: LLM) -> None:
    tree = {"$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}, "maxItems": 1}}, "$ref": "#/$defs/t"}
    (output,) = llm.generate("x", under(json=tree), use_tqdm=False)
    if output.outputs[0].finish_reason == "stop":
        json.loads(output.outputs[0].text)


@pytest.mark.parametrize("other", [{"min_tokens": 3}, {"bad_words": ["x"]}, {"allowed_token_ids": [5]}])
def test_what_could_leave_nothing_to_choose_is_refused(llm: LLM, other: dict[str, Any]) -> None:
    params = under(choice=["a"])
    for name, value in other.items():
        setattr(params, name, value)
    with pytest.raises(ParamsError) as refusal:
        llm.generate("x", params, use_tqdm=False)
    assert refusal.value.param in other
