"""The tiny checkpoints are fit to be an oracle: they load whole, see their pictures, choose clearly."""

from __future__ import annotations

import pytest
import torch

from tests import tiny
from tests.conftest import OTHER_NAMES
from tests.long import LONG
from tests.oracle import cases, reference
from tests.oracle.cases import Ask


@pytest.mark.parametrize("family", tiny.TINY)
def test_every_weight_of_the_model_is_in_the_file(family: str) -> None:
    kind = type(reference.model(family))
    sources = reference.sources(tiny.plain(family))
    _, report = kind.from_pretrained(**sources, dtype=torch.float32, output_loading_info=True)
    assert not report["missing_keys"]
    # Newer versions know themselves that the parts that speak are left out.
    spoken = ("talker.", "token2wav.", "code2wav.", "tts.") if family in (*tiny.THINKERS, "minicpmo") else ()
    assert not [key for key in report["unexpected_keys"] if not key.startswith(spoken)]
    assert not report["mismatched_keys"]


@pytest.mark.parametrize("family", tiny.TINY)
def test_greedy_choices_are_far_above_rounding(family: str) -> None:
    for ask in cases.all_asks(family):
        assert min(reference.answer(family, ask).gaps) > 1e-3, ask


@pytest.mark.parametrize("family", tiny.TINY)
def test_answers_are_not_monotonous(family: str) -> None:
    answers = [reference.answer(family, ask).token_ids for ask in cases.all_asks(family)]
    assert len({answer[:4] for answer in answers}) > len(answers) // 2
    assert sum(len(set(answer)) for answer in answers) > 0.3 * sum(map(len, answers))


@pytest.mark.parametrize("family", tiny.IMAGE_FAMILIES)
def test_content_and_order_of_pictures_change_the_answer(family: str) -> None:
    one, two = (84, 56, 1), (84, 56, 2)
    asks = [Ask("{i}{i}Compare.", pair) for pair in ((one, one), (one, two), (two, one), (two, two))]
    asks = list(dict.fromkeys(cases.fit(family, *asks)))
    assert len(asks) == (2 if family in tiny.LONE_FAMILIES else 4)
    assert len({reference.answer(family, ask).token_ids for ask in asks}) == len(asks)


@pytest.mark.parametrize("family", tiny.SOUND_FAMILIES)
def test_content_and_order_of_sounds_change_the_answer(family: str) -> None:
    one, two = (0.5, 1), (0.5, 2)
    asks = [Ask("{a}{a}Compare.", sounds=pair) for pair in ((one, one), (one, two), (two, one), (two, two))]
    assert len({reference.answer(family, ask).token_ids for ask in asks}) == 4


@pytest.mark.parametrize("family", tiny.VIDEO_FAMILIES)
def test_the_order_of_frames_changes_the_answer(family: str) -> None:
    forward = reference.inputs(family, *cases.fit(family, cases.VIDEO))
    # Families without a tower for videos take frames as pictures.
    name = next(name for name in ("pixel_values_videos", "pixel_values") if name in forward)
    pixels = forward[name]
    if family == "internvl":
        turned = pixels.flip(0)
    elif pixels.dim() > 2:
        turned = pixels.flip(1)
    else:
        turned = pixels.view(3, -1, pixels.shape[-1]).flip(0).reshape(pixels.shape)
    with torch.inference_mode():
        there = reference.model(family)(**forward).logits[0, -1]
        back = reference.model(family)(**forward | {name: turned}).logits[0, -1]
    assert (there - back).abs().max() > 1e-2


@pytest.mark.parametrize("family", ["qwen2_5_vl", *tiny.THINKERS])
def test_the_time_between_frames_changes_the_answer(family: str) -> None:
    answers = [reference.answer(family, ask).token_ids for ask in (cases.TIMED_VIDEO, cases.SLOW_VIDEO)]
    assert answers[0] != answers[1]


def test_each_form_of_a_family_has_one_that_is_asked_for_all() -> None:
    found = cases.forms_differ()
    assert len(set(found)) == len(found)
    assert [family for family in tiny.TINY if cases.form(family) not in found] == []


def test_a_checkpoint_is_made_once() -> None:
    first = tiny.checkpoint("llama")
    tiny.checkpoint.cache_clear()
    made = (first / "config.json").stat().st_mtime_ns
    assert tiny.checkpoint("llama") == first
    assert (first / "config.json").stat().st_mtime_ns == made


@pytest.mark.skipif(LONG, reason="the long form computes all answers")
def test_an_answer_is_kept_where_no_code_of_ours_gave_it(monkeypatch: pytest.MonkeyPatch) -> None:
    first = reference.answer("llama", cases.SHORT)
    reference._answer.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(reference, "_computed", lambda *_: pytest.fail("it is computed again"))
        assert reference.answer("llama", cases.SHORT) == first
    assert reference._computed("llama", cases.SHORT) == first
    places = {reference._place(family, ask) for family in ("llama", "mistral") for ask in (cases.SHORT, cases.LONG)}
    assert len(places) == 4
    assert reference._place("bee", cases.ONE) is None
    assert reference._place("smolvlm", cases.VIDEO_AND_PICTURE) is None


@pytest.mark.parametrize("family", tiny.TINY)
def test_a_family_is_found_by_its_other_names(family: str, request: pytest.FixtureRequest) -> None:
    assert request.node.extra_keyword_matches >= set(OTHER_NAMES.get(family, ()))


def test_other_names_belong_to_families() -> None:
    assert set(OTHER_NAMES) <= set(tiny.TINY)
    assert not {name for names in OTHER_NAMES.values() for name in names} & set(tiny.TINY)
