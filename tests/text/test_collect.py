"""What users see of a request: texts, ids, reasons, log-probabilities, whole and in pieces."""

from __future__ import annotations

import tracemalloc

import pytest

from beheld.core.errors import ParamsError, StepError
from beheld.core.media import MediaReceipt
from beheld.core.outputs import Logprob, TokenEvent
from beheld.core.params import SamplingParams
from beheld.core.plan import TokenLogprobs
from beheld.core.request import FinishReason, Request
from beheld.core.sampling import Sampling
from beheld.text.collect import Collector
from tests.fakes import fake_logprobs, prompt_columns
from tests.text import tokenizers_small as small

TOKENIZER = small.byte_level()
EOS = TOKENIZER.eos_token_id
RECEIPT = MediaReceipt("image", 0, {}, {}, (), 4, False, {})


def collector(params: SamplingParams, tokenizer: object = TOKENIZER) -> Collector:
    requests = [Request(f"r-{i}", (1, 2, 3), Sampling(), receipts=(RECEIPT,), prompt="Hello") for i in range(params.n)]
    return Collector("r", params, requests, tokenizer)


def tokens(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def play(collected: Collector, ids: list[int], finish: FinishReason | None = None, stop_id: int | None = None) -> bool:
    """Push a token each, `finish` with the last; True if the engine was to be told to stop, at which it ends."""
    for position, token_id in enumerate(ids):
        last = position == len(ids) - 1
        event = TokenEvent("r-0", (token_id,), finish if last else None, stop_id if last else None)
        if collected.push(event):
            return True
    return False


def test_end_of_sequence_is_an_id_without_text() -> None:
    collected = collector(SamplingParams(skip_special_tokens=False))
    assert not play(collected, [*tokens("a red circle"), EOS], FinishReason.STOP)
    output = collected.output()
    answer = output.outputs[0]
    assert answer.text == "a red circle"
    assert answer.token_ids == [*tokens("a red circle"), EOS]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", None)
    assert output.finished
    assert answer.finished()
    assert (output.prompt, output.prompt_token_ids, output.media) == ("Hello", [1, 2, 3], [RECEIPT])
    assert answer.logprobs is None
    assert answer.cumulative_logprob is None


@pytest.mark.parametrize("ends", [False, True])
def test_no_answer_comes_before_the_report_on_the_prompt(ends: bool) -> None:
    """The first answer alone brings it, and others, which find the prompt in the cache, may be ahead."""
    params = SamplingParams(n=2, prompt_logprobs=0)
    requests = [Request(f"r-{n}", (1, 2, 3), Sampling(prompt_logprobs=None if n else 0)) for n in range(2)]
    collected = Collector("r", params, requests, TOKENIZER)
    collected.push(TokenEvent("r-1", tuple(tokens("two")), None, None))
    first = collected.delta()
    assert (first.outputs, first.prompt_logprobs) == ([], None)
    if ends:
        # It was aborted before its prompt was computed.
        collected.push(TokenEvent("r-0", (), FinishReason.ABORT, None))
    else:
        report = prompt_columns([fake_logprobs(2), fake_logprobs(3)])
        collected.push(TokenEvent("r-0", tuple(tokens("one")), None, None, prompt_logprobs=report))
    second = collected.delta()
    assert [answer.index for answer in second.outputs] == [0, 1]
    assert second.outputs[1].text == "two"
    assert (second.prompt_logprobs is None) == ends
    collected.push(TokenEvent("r-1", tuple(tokens(" more")), FinishReason.LENGTH, None))
    assert [answer.text for answer in collected.delta().outputs] == [" more"]


def test_an_answer_that_begins_anew_has_nothing_of_the_former_one() -> None:
    params = SamplingParams(n=2, logprobs=0, stop=["three"])
    collected = collector(params)
    entry = TokenLogprobs(7, -1.0, 1)

    def push(name: str, text: str, finish: FinishReason | None = None) -> bool:
        ids = tuple(tokens(text))
        return collected.push(TokenEvent(name, ids, finish, logprobs=(entry,) * len(ids), num_cached=2))

    assert not push("r-0", "one two thr")
    assert push("r-1", "two three")
    for name in ("r-0", "r-1"):
        assert not collected.push(TokenEvent(name, (), restarted=True))
    assert collected.output().num_cached_tokens == 0
    assert not push("r-0", "ee four", FinishReason.LENGTH)
    answers = collected.output().outputs
    # The other one had ended before its engine did.
    assert [answer.text for answer in answers] == ["ee four", "two "]
    assert answers[0].token_ids == tokens("ee four")
    assert answers[0].cumulative_logprob == -1.0 * len(tokens("ee four"))
    assert answers[0].logprobs is not None
    assert len(answers[0].logprobs) == len(answers[0].token_ids)
    assert collected.finished


def test_own_stop_token_gives_its_id_as_reason_and_text_only_on_request() -> None:
    ids = tokens("one two.")
    for include, text in ((False, "one two"), (True, "one two.")):
        collected = collector(SamplingParams(stop_token_ids=[ids[-1]], include_stop_str_in_output=include))
        play(collected, ids, FinishReason.STOP, stop_id=ids[-1])
        answer = collected.output().outputs[0]
        assert (answer.text, answer.token_ids) == (text, ids)
        assert (answer.finish_reason, answer.stop_reason) == ("stop", ids[-1])


@pytest.mark.parametrize("include", [False, True])
def test_stop_string_ends_the_answer_here(include: bool) -> None:
    collected = collector(SamplingParams(stop=["zzz", "blue"], include_stop_str_in_output=include, max_tokens=99))
    ids = [token for letter in "red blue green" for token in tokens(letter)]
    assert play(collected, ids)
    answer = collected.output().outputs[0]
    assert answer.text == ("red blue" if include else "red ")
    assert (answer.finish_reason, answer.stop_reason) == ("stop", "blue")
    assert answer.token_ids == ids[:8]
    assert collected.finished
    assert not collected.push(TokenEvent("r-0", (ids[9],), FinishReason.LENGTH))
    assert collected.output().outputs[0] == answer


def test_stop_string_in_the_last_token_outranks_length_and_needs_no_stopping() -> None:
    collected = collector(SamplingParams(stop=["blue"]))
    assert not play(collected, tokens("a blue"), FinishReason.LENGTH)
    answer = collected.output().outputs[0]
    assert (answer.text, answer.finish_reason, answer.stop_reason) == ("a ", "stop", "blue")


def test_text_that_only_began_a_stop_string_is_shown_at_the_end() -> None:
    collected = collector(SamplingParams(stop=["circle!"]))
    ids = tokens("a circle")
    for token_id in ids:
        collected.push(TokenEvent("r-0", (token_id,)))
    assert collected.output().outputs[0].text == "a "
    collected.push(TokenEvent("r-0", (), FinishReason.ABORT))
    answer = collected.output().outputs[0]
    assert (answer.text, answer.finish_reason, answer.token_ids) == ("a circle", "abort", ids)


def test_stop_strings_wait_for_min_tokens() -> None:
    letters = [token for letter in "ab ab ab" for token in tokens(letter)]
    collected = collector(SamplingParams(stop="ab", min_tokens=4))
    assert play(collected, letters)
    answer = collected.output().outputs[0]
    assert (answer.text, len(answer.token_ids)) == ("ab ", 5)


def test_deltas_add_up() -> None:
    params = SamplingParams(n=2, stop=["NEVER"], logprobs=1, prompt_logprobs=0)
    collected = collector(params)
    lines = [tokens("The first image shows a 👩\u200d👧."), tokens("NEVE mind é")]
    texts, ids, logprobs = ["", ""], [[], []], [[], []]
    finishes: list[tuple[int, str]] = []
    prompt_logprobs = []
    prompt = prompt_columns([TokenLogprobs(2, -1.0, 3), TokenLogprobs(3, -2.0, 4)])
    for step in range(max(map(len, lines))):
        for index, line in enumerate(lines):
            if step >= len(line):
                continue
            event = TokenEvent(
                f"r-{index}",
                (line[step],),
                FinishReason.LENGTH if step == len(line) - 1 else None,
                logprobs=(TokenLogprobs(line[step], -0.5, 2, (7,), (-0.25,)),),
                prompt_logprobs=prompt if step == 0 else None,
            )
            assert not collected.push(event)
            delta = collected.delta()
            assert [answer.index for answer in delta.outputs] == [index]
            assert delta.finished == collected.finished
            prompt_logprobs.append(delta.prompt_logprobs)
            for answer in delta.outputs:
                texts[index] += answer.text
                ids[index] += answer.token_ids
                logprobs[index] += answer.logprobs or []
                if answer.finish_reason:
                    finishes.append((index, answer.finish_reason))
    whole = collected.output()
    assert whole.finished
    assert sorted(finishes) == [(0, "length"), (1, "length")]
    assert ids == lines
    assert texts == [TOKENIZER.decode(line) for line in lines]
    for index, answer in enumerate(whole.outputs):
        assert (answer.text, answer.token_ids, answer.logprobs) == (texts[index], ids[index], logprobs[index])
        assert answer.cumulative_logprob == pytest.approx(-0.5 * len(lines[index]))
    assert whole.prompt_logprobs is not None
    assert prompt_logprobs == [whole.prompt_logprobs] + [None] * (len(prompt_logprobs) - 1)
    assert collected.delta().outputs == []


def test_logprobs_have_the_token_itself_the_best_and_their_texts() -> None:
    red, blue, circle = (tokens(word)[0] for word in ("red", "blue", " circle"))
    collected = collector(SamplingParams(logprobs=2, prompt_logprobs=1))
    entry = TokenLogprobs(circle, -3.0, 9, (red, blue, 5), (-0.5, -1.5, -2.5))
    same = TokenLogprobs(red, -0.5, 1, (red, blue), (-0.5, -1.5))
    both = TokenLogprobs(2, -1.0, 3, (red,), (-0.1,)), TokenLogprobs(red, -0.1, 1, (red,), (-0.1,))
    prompt = prompt_columns(both)
    collected.push(TokenEvent("r-0", (circle,), logprobs=(entry,), prompt_logprobs=prompt, num_cached=2))
    collected.push(TokenEvent("r-0", (red,), FinishReason.LENGTH, logprobs=(same,)))
    output = collected.output()
    first, second = output.outputs[0].logprobs or []
    assert [(k, v.logprob, v.rank) for k, v in first.items()] == [(circle, -3.0, 9), (red, -0.5, 1), (blue, -1.5, 2)]
    assert [v.decoded_token for v in first.values()] == [TOKENIZER.decode([t]) for t in (circle, red, blue)]
    assert list(second) == [red, blue]
    assert output.prompt_logprobs is not None
    nothing, one, two = output.prompt_logprobs
    assert nothing is None
    assert one is not None
    assert two is not None
    assert list(one) == [2, red]
    assert list(two) == [red]
    assert output.num_cached_tokens == 2


def test_without_detokenising_there_is_no_text() -> None:
    ids = tokens("red")
    for collected in (collector(SamplingParams(detokenize=False)), collector(SamplingParams(), None)):
        play(collected, ids, FinishReason.LENGTH)
        answer = collected.output().outputs[0]
        assert (answer.text, answer.token_ids) == ("", ids)
    with pytest.raises(ParamsError, match="tokenizer"):
        collector(SamplingParams(stop="x"), None)


def test_an_error_ends_the_whole_request() -> None:
    collected = collector(SamplingParams(n=2))
    collected.push(TokenEvent("r-0", (5,)))
    error = StepError("nan")
    collected.push(TokenEvent("r-1", (), FinishReason.ERROR, error=error))
    output = collected.output()
    assert (output.error, output.outputs, output.finished, output.media) == (error, [], True, [RECEIPT])
    assert collected.delta().error is error


def test_the_cache_is_reported_for_the_first_answer() -> None:
    collected = collector(SamplingParams(n=2))
    collected.push(TokenEvent("r-1", (5,), num_cached=3))
    collected.push(TokenEvent("r-0", (5,), num_cached=1))
    assert collected.output().num_cached_tokens == 1


def test_a_candidates_text_is_never_a_part_of_a_character() -> None:
    """A character of several tokens stands in the text of the token that completes it."""
    written = "a 絵 é 👩."
    ids = tokens(written)
    broken = [token for token in ids if "\ufffd" in TOKENIZER.decode([token])]
    assert broken, "each token is a whole character: nothing is tested"
    collected = collector(SamplingParams(logprobs=1, prompt_logprobs=0))
    prompt = prompt_columns([TokenLogprobs(token, -1.0, 1, (), ()) for token in ids])
    for place, token in enumerate(ids):
        top = TokenLogprobs(token, -1.0, 1, (token,), (-1.0,))
        last = place == len(ids) - 1
        event = TokenEvent("r-0", (token,), FinishReason.LENGTH if last else None, logprobs=(top,))
        collected.push(event._replace(prompt_logprobs=prompt) if not place else event)
    output = collected.output()
    answer = output.outputs[0]
    assert [list(entry) for entry in answer.logprobs or ()] == [[token] for token in ids]
    for entries in (answer.logprobs or (), (output.prompt_logprobs or ())[1:]):
        texts = [entry[token].decoded_token or "" for token, entry in zip(ids, entries, strict=True) if entry]
        assert "".join(texts) == written
        assert not any("\ufffd" in text for text in texts)


def test_without_detokenization_candidates_have_no_text() -> None:
    collected = collector(SamplingParams(logprobs=1, detokenize=False))
    (token,) = tokens("a")
    entry = TokenLogprobs(token, -1.0, 1, (token + 1,), (-2.0,))
    collected.push(TokenEvent("r-0", (token,), FinishReason.LENGTH, logprobs=(entry,)))
    logprobs = collected.output().outputs[0].logprobs
    assert logprobs is not None
    (found,) = logprobs
    assert [one.decoded_token for one in found.values()] == [None, None]


def test_log_probabilities_are_made_anew_from_columns_whenever_they_are_read() -> None:
    """Whole outputs, parts, and entries that are read later agree, also where a token begins a character."""
    ids = [*tokens("a "), *TOKENIZER.encode("\N{SNOWMAN} \N{GRINNING FACE}", add_special_tokens=False), *tokens(" b")]
    params = SamplingParams(logprobs=2)
    whole, parts = collector(params), collector(params)
    request = Request("r-0", (1, 2, 3), Sampling(), prompt="Hello")
    lazy = Collector("r", params, [request], TOKENIZER, lazy_prompt=True)
    seen: list[dict[int, Logprob]] = []
    for place, token in enumerate(ids):
        # The number of candidates may change, and their numbers need not fit into 32 bits.
        top = tuple(range(5, 5 + place % 3))
        entry = TokenLogprobs(token, -0.1 * place, place + 1, top, tuple(-0.3 - rank for rank in top))
        event = TokenEvent("r-0", (token,), FinishReason.LENGTH if place == len(ids) - 1 else None, logprobs=(entry,))
        for one in (whole, parts, lazy):
            one.push(event)
        if place % 2:
            assert len(whole.output().outputs[0].logprobs or ()) == place + 1
            seen += parts.delta().outputs[0].logprobs or ()
    seen += [entry for answer in parts.delta().outputs for entry in answer.logprobs or ()]
    made = whole.output().outputs[0].logprobs
    assert made is not None
    assert [entry[token].logprob for entry, token in zip(made, ids, strict=True)] == [-0.1 * k for k in range(len(ids))]
    assert "".join(entry[token].decoded_token or "" for entry, token in zip(made, ids, strict=True)) == (
        "a \N{SNOWMAN} \N{GRINNING FACE} b"
    )
    later = lazy.output().outputs[0].logprobs
    assert later is not None
    assert not isinstance(later, list)
    assert len(later) == len(ids)
    # Twice, as they are not kept; and a part may be followed by the whole.
    assert seen == made == list(later) == list(later) == parts.output().outputs[0].logprobs


def test_a_long_answers_log_probabilities_take_little_memory() -> None:
    collected = collector(SamplingParams(logprobs=20))
    entry = TokenLogprobs(5, -0.5, 1, tuple(range(20)), tuple(-0.1 * k for k in range(20)))
    collected.push(TokenEvent("r-0", (5,), logprobs=(entry,)))
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(2000):
            collected.push(TokenEvent("r-0", (5,), logprobs=(entry,)))
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert grown < 2000 * 600
