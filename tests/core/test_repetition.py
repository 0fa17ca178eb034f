"""Answers that repeat themselves are found at the token that completes the repetition."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from beheld import LLM, SamplingParams
from beheld.compat.ngram import NGramPerReqLogitsProcessor, repeating
from beheld.core.errors import ParamsError
from beheld.core.repetition import NoRepeatWindow, RepetitionDetectionParams, RepetitionRuns
from beheld.families import registry
from tests import tiny
from tests.oracle import reference
from tests.oracle.cases import ROOMY, Ask


def ends(ids: list[int], rule: RepetitionDetectionParams) -> bool:
    """The definition, word by word."""
    for size in range(max(1, rule.min_pattern_size), rule.max_pattern_size + 1):
        whole = size * rule.min_count
        if whole <= len(ids) and ids[-whole:] == ids[-size:] * rule.min_count:
            return True
    return False


def test_runs_are_the_definition() -> None:
    dice = random.Random(0)
    found = 0
    for _ in range(600):
        largest = dice.randrange(1, 6)
        rule = RepetitionDetectionParams(largest, dice.randrange(largest + 1), dice.randrange(2, 5))
        runs, ids = RepetitionRuns(rule), []
        for _ in range(24):
            ids.append(dice.randrange(2))
            expected = ends(ids, rule)
            assert runs.push(ids[-1]) == expected, (ids, rule)
            found += expected
    assert found > 1000


def test_short_answers_may_repeat_themselves() -> None:
    runs = RepetitionRuns(RepetitionDetectionParams(max_pattern_size=2, min_count=3, after=8))
    assert [runs.push(token) for token in (1, 2) * 8] == [False] * 13 + [True] * 3


def test_a_repetition_has_so_many_tokens() -> None:
    runs = RepetitionRuns(RepetitionDetectionParams(max_pattern_size=2, min_count=3, least=8))
    assert [runs.push(token) for token in (1, 2) * 5] == [False] * 7 + [True] * 3


@pytest.mark.parametrize(
    "given",
    [
        {"max_pattern_size": -1},
        {"max_pattern_size": 4, "min_count": 1},
        {"max_pattern_size": 4, "min_pattern_size": 5, "min_count": 2},
        {"max_pattern_size": 10**6, "min_count": 2},
        {"max_pattern_size": True, "min_count": 2},
        {"max_patern_size": 4},
        {"max_pattern_size": 4, "min_count": 2, "after": -1},
        {"max_pattern_size": 4, "min_count": 2, "least": -1},
    ],
)
def test_what_is_wrong_is_refused(given: dict[str, int]) -> None:
    with pytest.raises(ParamsError, match="repetition_detection"):
        SamplingParams(repetition_detection=given)  # type: ignore[arg-type]
    with pytest.raises(ParamsError, match="must be a RepetitionDetectionParams"):
        SamplingParams(repetition_detection=3)  # type: ignore[arg-type]


def test_an_answer_ends_where_it_repeats_itself() -> None:
    ask = Ask("Hi!", max_tokens=20)
    whole = list(reference.answer("llama", ask).token_ids)
    only = whole[3]
    # What the model would write is replaced by one token, again and again.
    params = SamplingParams(
        temperature=0,
        max_tokens=20,
        ignore_eos=True,
        allowed_token_ids=[only],
        repetition_detection=RepetitionDetectionParams(max_pattern_size=3, min_pattern_size=2, min_count=3),
    )
    free = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, repetition_detection={})  # type: ignore[arg-type]
    late = params.clone()
    late.min_tokens = 9
    with LLM(str(tiny.checkpoint("llama")), dtype="float32", seed=0, async_scheduling=True, **ROOMY) as llm:
        prompt = {"prompt": ask.prompt("llama")}
        outputs = llm.generate([prompt] * 3, [params, free, late], use_tqdm=False)
    first, second, third = (output.outputs[0] for output in outputs)
    assert list(first.token_ids) == [only] * 6
    assert (first.finish_reason, first.stop_reason) == ("repetition", "repetition_detected")
    assert list(second.token_ids) == whole
    assert second.finish_reason == "length"
    assert len(third.token_ids) == 9


def test_a_family_ends_what_its_card_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    """HunyuanOCR's; a request may say otherwise, and so may the engine."""
    hunyuan = registry.inputs(registry.find("hunyuan_vl"))
    rule = RepetitionDetectionParams(max_pattern_size=3, min_count=3, after=3)
    assert hunyuan.repetition is not None
    monkeypatch.setattr(registry, "inputs", lambda family: replace(hunyuan, repetition=rule))
    # One token, again and again.
    usual = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, allowed_token_ids=[5])
    without, own = usual.clone(), usual.clone()
    without.repetition_detection = RepetitionDetectionParams()
    own.repetition_detection = RepetitionDetectionParams(max_pattern_size=1, min_count=8)
    prompt = {"prompt": tiny.wrap("hunyuan_vl", "Hi!")}
    for config, lengths in (("auto", [6, 12, 8]), ("vllm", [12, 12, 8])):
        with LLM(str(tiny.checkpoint("hunyuan_vl")), dtype="float32", generation_config=config, **ROOMY) as llm:
            outputs = llm.generate([prompt] * 3, [usual, without, own], use_tqdm=False)
        assert [len(output.outputs[0].token_ids) for output in outputs] == lengths
        reasons = ["repetition" if length < 12 else "length" for length in lengths]
        assert [output.outputs[0].finish_reason for output in outputs] == reasons


def test_a_family_does_not_write_what_its_card_bans(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSeek-OCR's; a request may say otherwise, and so may the engine."""
    family = registry.inputs(registry.find("llama"))
    ban = NoRepeatWindow(2, 6, frozenset((7,)))
    monkeypatch.setattr(registry, "inputs", lambda _: replace(family, no_repeat=ban))
    usual = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, allowed_token_ids=[5, 6, 7])
    without, own = usual.clone(), usual.clone()
    without.repetition_detection = RepetitionDetectionParams()
    own.extra_args = {"ngram_size": 1, "window_size": 2}
    prompt = {"prompt": tiny.wrap("llama", "Hi!")}
    found = {}
    for config in ("auto", "vllm"):
        options = {"generation_config": config, "logits_processors": [NGramPerReqLogitsProcessor], **ROOMY}
        with LLM(str(tiny.checkpoint("llama")), dtype="float32", seed=0, async_scheduling=True, **options) as llm:
            outputs = llm.generate([prompt] * 3, [usual, without, own], use_tqdm=False)
        found[config] = [list(output.outputs[0].token_ids) for output in outputs]
    banned, free, other = found["auto"]
    assert found["vllm"] == [free, free, other]
    assert all(token not in repeating(banned[:place], 2, 6) - {7} for place, token in enumerate(banned))
    assert any(token in repeating(free[:place], 2, 6) - {7} for place, token in enumerate(free))
    assert all(len(set(other[place : place + 3])) == 3 for place in range(22))
    # Without a class that reads them, the extra arguments lift no ban.
    with LLM(str(tiny.checkpoint("llama")), dtype="float32", seed=0, **ROOMY) as llm:
        (output,) = llm.generate([prompt], [own], use_tqdm=False)
    assert list(output.outputs[0].token_ids) == banned


ADVISED = {
    "deepseek_ocr": NoRepeatWindow(30, 90, frozenset((128821, 128822))),
    "deepseek_ocr2": NoRepeatWindow(20, 90, frozenset((128821, 128822))),
}


def test_what_cards_advise_stands_in_their_families() -> None:
    """No other family bans or ends repetition by itself: what a card does not advise stays off."""
    told = {}
    for package in registry.families():
        inputs = registry.inputs(package)
        if advised := inputs.no_repeat or inputs.repetition or (inputs.speech and inputs.speech.most_per_s):
            told[package.removeprefix("beheld.families.")] = advised
    assert told == {**ADVISED, "hunyuan_vl": HUNYUAN, "moonshine": 6.5, "moonshine_streaming": 6.5}


HUNYUAN = registry.inputs(registry.find("hunyuan_vl")).repetition


@pytest.mark.parametrize("cell", [[5], [5, 6], [5, 6, 7, 8]])
def test_a_page_goes_on_behind_its_empty_cells(cell: list[int]) -> None:
    """Ten empty cells or a line of dots past 4,000 tokens ended HunyuanOCR's page; its card cuts only what ends so."""
    assert HUNYUAN is not None
    runs = RepetitionRuns(HUNYUAN)
    page = [*range(100, 5100), *(cell * 60), *range(100, 1100)]
    assert not any(runs.push(token) for token in page)


@pytest.mark.parametrize("size", [1, 7, 128])
def test_an_endless_page_ends(size: int) -> None:
    assert HUNYUAN is not None
    runs = RepetitionRuns(HUNYUAN)
    page = [*range(1000, 6000), *(list(range(size)) * (4000 // size))]
    ended = next(place for place, token in enumerate(page) if runs.push(token))
    assert 5000 + 10 * size <= ended + 1 <= 7000
