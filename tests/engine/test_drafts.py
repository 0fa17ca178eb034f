"""Several tokens a step from the scheduler to the user: grammars, stop strings, log-probabilities."""

from __future__ import annotations

import re
from functools import cache

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from beheld.core.outputs import CompletionOutput
from beheld.core.params import SamplingParams
from beheld.core.plan import STUCK, Admission, SeqSlice, StepPlan, StepResult
from beheld.core.request import Request
from beheld.core.structured_outputs import Grammar
from beheld.engine.core import EngineCore, InFlight
from beheld.structured.compile import Compiler
from beheld.structured.rows import GrammarRows
from beheld.text.collect import Collector
from tests.fakes import (
    VOCAB,
    FakeRunner,
    fake_capacity,
    fake_config,
    fake_info,
    fake_request,
    first_state,
    mix,
)

EOS = 2
BOTH = pytest.mark.parametrize("overlap", [False, True])
# The letters of the fake vocabulary: what text a token has.
LETTERS = "0123456789abcdefghijklmnopqrstuvwxyz-_.,:;ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """One token for each letter, and words of two to fill the vocabulary."""
    words = ["<a>", "<b>", "</s>", *LETTERS]
    words += [a + b for a in "ab" for b in LETTERS][: VOCAB - len(words)]
    vocabulary = {word: index for index, word in enumerate(words)}
    assert len(vocabulary) == VOCAB
    assert vocabulary["</s>"] == EOS
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<a>", "<b>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>")


def compiler() -> Compiler:
    return Compiler(tokenizer().backend_tokenizer.to_str, VOCAB, frozenset({EOS}))


class Recalling(FakeRunner):
    """Expects what it has answered before to the same prompt: two tokens right, two wrong."""

    answers: dict[int, list[int]]

    def recall(self, requests: dict[Request, list[int]]) -> None:
        self.answers = {}
        for request, answer in requests.items():
            state = first_state(request.lora, [])
            for token in request.token_ids:
                state = mix(state, token)
            for index, token in enumerate(answer):
                self.answers[state] = answer[index:]
                state = mix(state, token)
        self.drafts = self.expected

    def expected(self, state: int, most: int) -> tuple[int, ...]:
        known = self.answers.get(state, [])[:4]
        return tuple(token if place < 2 else (token + 1) % VOCAB for place, token in enumerate(known))


def run(
    request: Request, params: SamplingParams, *, overlap: bool, answer: list[int] | None = None
) -> tuple[CompletionOutput, int, int]:
    """What the user gets, the steps that it took, and the draft tokens that were right."""
    info = fake_info()
    config = fake_config(overlap=overlap, num_draft_tokens=0 if answer is None else 4)
    runner = Recalling(config, info, fake_capacity(info, config))
    if answer is not None:
        runner.recall({request: answer})
    core = EngineCore(info, runner)
    core.grammars = GrammarRows(compiler())
    collector = Collector("r", params, [request], tokenizer())
    core.add(request)
    in_flight: InFlight | None = None
    while core.scheduler.has_work or in_flight is not None:
        in_flight, events = core.step(in_flight)
        for event in events:
            assert event.error is None, event.error
            if collector.push(event):
                core.scheduler.stop(event.request_id)
    stats = core.scheduler.stats()
    assert stats.num_free_blocks == stats.num_blocks
    return collector.output().outputs[0], core.stats().steps, runner.num_accepted


@BOTH
def test_a_grammar_follows_the_drafts_that_are_right(overlap: bool) -> None:
    grammar = Grammar("regex", r"[a-c]{6}-[0-9]{8}(x[a-z]{3}){3}")
    for seed in range(8):
        request = fake_request("r", [5, 6, seed], max_tokens=60, stop_ids=frozenset({EOS}), grammar=grammar, logprobs=1)
        params = SamplingParams(max_tokens=60, logprobs=1)
        plain, steps, _ = run(request, params, overlap=overlap)
        assert re.fullmatch(grammar.text, plain.text)
        assert plain.finish_reason == "stop"
        quick, fewer, accepted = run(request, params, overlap=overlap, answer=plain.token_ids)
        assert (quick.text, quick.token_ids, quick.finish_reason) == (plain.text, plain.token_ids, "stop")
        assert quick.logprobs == plain.logprobs
        assert quick.cumulative_logprob == plain.cumulative_logprob
        assert accepted > 0
        assert fewer < 0.6 * steps


@BOTH
def test_a_stop_string_cuts_the_tokens_of_a_step(overlap: bool) -> None:
    cuts = 0
    for seed in range(12):
        request = fake_request("r", [5, 6, seed], max_tokens=30, logprobs=1)
        plain, *_ = run(request, SamplingParams(max_tokens=30, logprobs=1), overlap=overlap)
        for place in range(2, 9):
            stop = tokenizer().decode(plain.token_ids[place : place + 2])
            for include in (False, True):
                params = SamplingParams(max_tokens=30, stop=[stop], include_stop_str_in_output=include, logprobs=1)
                slow, *_ = run(request, params, overlap=overlap)
                quick, *_ = run(request, params, overlap=overlap, answer=plain.token_ids)
                assert quick == slow
                assert len(quick.logprobs or []) == len(quick.token_ids)
                cuts += len(quick.token_ids) % 3 != 1
    assert cuts > 20


def test_masks_stand_for_each_draft_and_leave_the_row_where_it_is() -> None:
    rows = GrammarRows(compiler())
    grammar = Grammar("regex", r"ab[0-9]z")
    a, b, one, z = tokenizer().convert_tokens_to_ids(["a", "b", "1", "z"])
    request = fake_request("r", [5], grammar=grammar)
    admission = Admission(0, (5,), 1, (), request.params, None, 0, ((),))
    first = rows.masked(StepPlan(0, (SeqSlice(0, 0, 1, ((1,),), 1),), (admission,)))
    (mask,) = first.masks[0]
    assert a in bits(mask)
    assert b not in bits(mask)
    rows.advanced(StepResult(0, {0: (a,)}))
    # The second draft is not what the grammar allows: what follows it is never sampled.
    drafted = rows.masked(StepPlan(1, (SeqSlice(0, 1, 5, ((),), 4, (a, b, z, one)),)))
    after_a, after_b, after_z, last = drafted.masks[0]
    digits = set(tokenizer().convert_tokens_to_ids(list("0123456789")))
    assert bits(after_a) == {b}
    assert bits(after_b) == digits
    assert bits(after_z) == bits(last) == set(range(VOCAB))
    result = rows.advanced(StepResult(1, {0: (b, one)}))
    assert result.tokens[0] == (b, one)
    assert not result.failed
    (end,) = rows.masked(StepPlan(2, (SeqSlice(0, 3, 4, ((),), 1),))).masks[0]
    assert bits(end) == {z}


def test_a_grammar_that_is_stuck_behind_right_drafts_keeps_the_tokens_before() -> None:
    rows = GrammarRows(compiler())
    a, b = tokenizer().convert_tokens_to_ids(["a", "b"])
    request = fake_request("r", [5], grammar=Grammar("regex", r"abab"))
    admission = Admission(0, (5,), 1, (), request.params, None, 0, ((),))
    rows.masked(StepPlan(0, (SeqSlice(0, 0, 1, ((1,),), 1),), (admission,)))
    result = rows.advanced(StepResult(0, {0: (a, b, b)}))
    assert (result.tokens, result.failed) == ({0: (a, b)}, {0: STUCK})


def bits(mask: bytes) -> set[int]:
    return {token for token in range(VOCAB) if mask[token // 8] >> token % 8 & 1}
