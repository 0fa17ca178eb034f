"""Beam search gives transformers' sequences where both go on as long: in answers of one length."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from beheld import LLM, AsyncLLM, SamplingParams
from beheld.api.beam import beam_search
from beheld.core.beams import BeamSearch, BeamSearchParams
from beheld.core.errors import ParamsError
from beheld.core.outputs import Logprob
from beheld.core.structured_outputs import StructuredOutputs
from tests import tiny

SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 22, 3]}}, "required": ["n"]}
PROMPTS = ("A cat sat on", "Once upon a time there was")


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(str(tiny.checkpoint("llama")), dtype="float32", max_model_len=128)


@pytest.mark.parametrize("width", [1, 3, 4])
def test_sequences_are_those_of_transformers(llm: LLM, width: int) -> None:
    folder = tiny.checkpoint("llama")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    # No token ends an answer, so that all have one length: the penalty divides all scores alike.
    model.generation_config.eos_token_id = None
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    found = llm.beam_search(
        [{"prompt": text} for text in PROMPTS],
        BeamSearchParams(beam_width=width, max_tokens=8, ignore_eos=True, skip_special_tokens=width != 4),
    )
    for text, output in zip(PROMPTS, found, strict=True):
        ids = tokenizer(text, return_tensors="pt").input_ids
        theirs = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=8,
            do_sample=False,
            pad_token_id=0,
        )
        assert [sequence.tokens for sequence in output.sequences] == theirs.tolist()
        assert [sequence.text for sequence in output.sequences] == tokenizer.batch_decode(
            theirs, skip_special_tokens=width != 4
        )
        assert all(sequence.finish_reason == "length" for sequence in output.sequences)
        scores = [sequence.cum_logprob for sequence in output.sequences]
        assert scores == sorted(scores, reverse=True)


def test_sequences_of_allowed_tokens(llm: LLM) -> None:
    allowed = llm.get_tokenizer()("a b c d e f", add_special_tokens=False).input_ids
    few = BeamSearchParams(beam_width=3, max_tokens=4, ignore_eos=True, allowed_token_ids=[*allowed, allowed[0]])
    (output,) = llm.beam_search([PROMPTS[0]], few)
    num_prompt = len(llm.get_tokenizer()(PROMPTS[0]).input_ids)
    assert len({tuple(one.tokens) for one in output.sequences}) == 3
    assert all(set(one.tokens[num_prompt:]) <= set(allowed) for one in output.sequences)
    # The same log-probabilities as without: of all tokens.
    (scored,) = llm.generate(
        [{"prompt_token_ids": output.sequences[0].tokens}],
        SamplingParams(max_tokens=1, prompt_logprobs=0),
        use_tqdm=False,
    )
    entries = scored.prompt_logprobs[num_prompt:]
    total = sum(
        entry[token].logprob for entry, token in zip(entries, output.sequences[0].tokens[num_prompt:], strict=True)
    )
    assert output.sequences[0].cum_logprob == pytest.approx(total, abs=1e-4)
    with pytest.raises(ParamsError, match="allowed_token_ids"):
        BeamSearchParams(2, 4, structured_outputs=StructuredOutputs(regex="a"), allowed_token_ids=[1])
    with pytest.raises(ParamsError, match="must not be empty"):
        llm.beam_search([PROMPTS[0]], BeamSearchParams(2, 4, allowed_token_ids=[]))


def test_a_server_s_engine_searches_with_a_grammar() -> None:
    async def answers() -> list[str]:
        llm = AsyncLLM(str(tiny.checkpoint("llama")), dtype="float32", max_model_len=128)
        params = BeamSearchParams(3, 20, structured_outputs=StructuredOutputs(choice=["yes", "no", "not so"]))
        try:
            return [one.text async for output in llm.beam_search(PROMPTS[0], params) for one in output.outputs]
        finally:
            llm.close()

    found = asyncio.run(answers())
    assert len(found) == 3
    assert {"yes", "no", "not so"}.issuperset(found)


@pytest.mark.parametrize("form", [{"regex": "(a|bc)d{2,4}"}, {"choice": ["yes", "no", "not so"]}, {"json": SCHEMA}])
def test_sequences_follow_a_grammar(llm: LLM, form: dict[str, Any]) -> None:
    """As greedy answers with the grammar do, and each is another."""
    grammar = StructuredOutputs(**form)
    params = BeamSearchParams(beam_width=3, max_tokens=60, structured_outputs=grammar, ignore_eos=True)
    for text, output in zip(PROMPTS, llm.beam_search(list(PROMPTS), params), strict=True):
        num_prompt = len(llm.get_tokenizer()(text).input_ids)
        answers = [llm.get_tokenizer().decode(one.tokens[num_prompt:]).strip() for one in output.sequences]
        # One text may be spelled with several sequences of tokens.
        assert len({tuple(one.tokens) for one in output.sequences}) == 3
        assert {one.finish_reason for one in output.sequences} == {"stop"}
        for answer in answers:
            if "json" in form:
                assert set(json.loads(answer)) == {"n"}
            else:
                assert re.fullmatch(form.get("regex", "yes|no|not so"), answer)
    (narrow,) = llm.beam_search([PROMPTS[0]], BeamSearchParams(beam_width=1, max_tokens=60, structured_outputs=grammar))
    greedy = SamplingParams(temperature=0, max_tokens=60, structured_outputs=grammar)
    (answer,) = llm.generate([PROMPTS[0]], greedy, use_tqdm=False)
    found = narrow.sequences[0].tokens[len(answer.prompt_token_ids or ()) :]
    assert found == list(answer.outputs[0].token_ids)[: len(found)]


def test_prompts_one_by_one_give_the_same(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=4)
    together = llm.beam_search(list(PROMPTS), params)
    apart = llm.beam_search(list(PROMPTS), params, concurrency_limit=1)
    assert [[s.tokens for s in o.sequences] for o in together] == [[s.tokens for s in o.sequences] for o in apart]


def test_an_ended_sequence_competes_with_longer_ones() -> None:
    search = BeamSearch([7], BeamSearchParams(beam_width=2, max_tokens=2, length_penalty=0), [0], 100)
    search.take([{0: Logprob(-1.0), 1: Logprob(-0.5), 2: Logprob(-3.0)}])
    assert [beam.tokens for beam in search.beams] == [[7, 1], [7, 2]]
    search.take([{3: Logprob(-0.1), 4: Logprob(-5.0)}, {5: Logprob(-0.1)}])
    assert not search.beams
    assert [(s.tokens, s.finish_reason) for s in search.best()] == [([7, 1, 3], "length"), ([7, 0], "stop")]


def test_a_complete_grammar_ends_a_sequence_once() -> None:
    """It allows each token that ends answers: the same answer came once for each, in place of others."""
    params = BeamSearchParams(2, 2, structured_outputs=StructuredOutputs(choice=["a", "ab"]))
    search = BeamSearch([7], params, [0, 9], 100)
    search.take([{1: Logprob(-0.5)}])
    search.take([{0: Logprob(-0.1), 9: Logprob(-0.2), 2: Logprob(-3.0)}])
    assert [s.tokens for s in search.best()] == [[7, 1, 0], [7, 1, 2]]


def test_a_search_ends_where_a_grammar_and_generate_end(tmp_path: Path) -> None:
    """With the tokenizer's own token, too, where the checkpoint's configurations name another."""
    folder = shutil.copytree(tiny.checkpoint("llama"), tmp_path / "c")
    own = transformers.AutoTokenizer.from_pretrained(folder).eos_token_id
    for name in ("config.json", "generation_config.json"):
        if (folder / name).is_file():
            held = json.loads((folder / name).read_text()) | {"eos_token_id": 5}
            (folder / name).write_text(json.dumps(held))
    params = BeamSearchParams(2, 8, structured_outputs=StructuredOutputs(choice=["a", "b"]))

    async def served() -> list[str | None]:
        llm = AsyncLLM(str(folder), dtype="float32", max_model_len=128)
        try:
            return [one.finish_reason async for output in llm.beam_search("x", params) for one in output.outputs]
        finally:
            llm.close()

    with LLM(str(folder), dtype="float32", max_model_len=128) as llm:
        assert llm._info.eos_ids == {5} != {own}
        (output,) = llm.beam_search(["x"], params)
    assert [one.finish_reason for one in output.sequences] == ["stop", "stop"]
    assert {one.text for one in output.sequences} == {"xa", "xb"}
    assert asyncio.run(served()) == ["stop", "stop"]


def test_the_length_is_the_answer_s_with_the_token_that_ends_it() -> None:
    """As transformers counts it: a long prompt evens nothing out."""
    search = BeamSearch([7] * 50, BeamSearchParams(beam_width=2, max_tokens=2), [0], 100)
    search.take([{0: Logprob(-1.5), 1: Logprob(-2.0), 2: Logprob(-9.0)}])
    search.take([{3: Logprob(-0.5)}, {3: Logprob(-0.1)}])
    # -1.5 over 1 token is less than -2.5 over 2, though not over 51 and 52.
    assert [s.tokens[50:] for s in search.best()] == [[1, 3], [0]]
    ended = BeamSearch([7] * 50, BeamSearchParams(beam_width=1, max_tokens=2), [0], 100)
    ended.take([{1: Logprob(-1.0), 2: Logprob(-8.0)}])
    # The one that ends an answer counts.
    ended.take([{0: Logprob(-1.0), 3: Logprob(-1.1)}])
    assert [s.tokens[50:] for s in ended.best()] == [[1, 0]]


@pytest.mark.parametrize("kept", [False, True])
def test_the_token_that_ends_a_sequence_is_left_out_unless_it_is_asked_for(kept: bool) -> None:
    with LLM(str(tiny.checkpoint("llama")), dtype="float32", max_model_len=128) as plain:
        ids = plain.get_tokenizer().encode(PROMPTS[0])
        best = plain.beam_search([PROMPTS[0]], BeamSearchParams(beam_width=1, max_tokens=2, ignore_eos=True))[0]
        second = best.sequences[0].tokens[-1]
        params = BeamSearchParams(beam_width=1, max_tokens=4, include_stop_str_in_output=kept)
        found = beam_search(plain, [PROMPTS[0]], params, None, None, [second], plain._config)[0].sequences[0]
    assert found.finish_reason == "stop"
    assert len(found.logprobs) == 2
    assert found.tokens == [*ids, best.sequences[0].tokens[-2], *([second] if kept else [])]


def test_what_is_refused(llm: LLM) -> None:
    with pytest.raises(ParamsError, match="BeamSearchParams"):
        llm.beam_search(["a"], None)  # type: ignore[arg-type]
    with pytest.raises(ParamsError, match="beam_width"):
        BeamSearchParams(beam_width=0, max_tokens=4)
    many: Any
    for many in (5, "ab", [-1], ["a"], [True], list(range(129))):
        with pytest.raises(ParamsError, match="allowed_token_ids") as caught:
            BeamSearchParams(2, 4, allowed_token_ids=many)
        assert caught.value.param == "allowed_token_ids"
    assert "Allow fewer" in caught.value.remedy
    assert BeamSearchParams(2, 4, allowed_token_ids=[*range(128), 0]).allowed_token_ids == [*range(128), 0]
