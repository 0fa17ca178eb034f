"""Which frames the processor of videos is given, at which times, by which options; what receipts say of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from beheld.core.errors import ConfigError, MediaError, ParamsError
from beheld.inputs.pipeline import RequestOrder
from tests import tiny
from tests.inputs import pipes

# Families whose model is told when frames were, in words, on the frames or by positions.
UNTIMED = ("llava_onevision", "llava_next_video", "hyperclovax_vlm", "interns1", "internvl", "minicpmv", "qwen2_vl")
UNTIMED += ("minicpmo", "minicpmv_4_0", "minicpmv_4_5")
# transformers has no processor of theirs to compare with.
OWN_PROCESSOR = ("hyperclovax_vlm", "minicpmo", "minicpmv", "minicpmv_4_0", "minicpmv_4_5")
TIMED = tuple(family for family in tiny.VIDEO_FAMILIES if family not in UNTIMED)
# They refuse frames without times.
GLM = tuple(family for family in TIMED if family.startswith("glm"))
# Families that choose among frames, unless they are told not to.
CHOOSING = ("qwen3_vl", "qwen3_vl_moe", "gemma4", "gemma4_dense", "molmo2")

# Older versions of transformers have no such class.
NEEDS_MOLMO = pytest.mark.skipif("molmo2" not in tiny.TINY, reason="transformers has no Molmo 2")


def asked(family: str, given: Any, **options: Any) -> Any:
    prompt = tiny.wrap(family, tiny.markers(family, num_videos=1) + "What?")
    data = {"prompt": prompt, "multi_modal_data": {"video": given}, "mm_processor_kwargs": options}
    return pipes.shared(family).prepare(RequestOrder(data, pipes.ONE_TOKEN, request_id="0"))


def used(request: Any) -> Any:
    return request.receipts[0].used


def assert_same(mine: Any, theirs: Any) -> None:
    """The model is given the same: ids, features, and what positions are made of."""
    assert mine.token_ids == theirs.token_ids
    mine, theirs = mine.spans[0].item, theirs.spans[0].item
    assert mine.layout == theirs.layout
    assert mine.features.keys() == theirs.features.keys()
    assert all(torch.equal(mine.features[name], theirs.features[name]) for name in mine.features)


@pytest.mark.parametrize("family", [family for family in TIMED if family not in GLM])
def test_the_rate_that_the_model_was_told_of_frames_without_times_is_in_their_receipt(family: str) -> None:
    frames = tiny.frames(6)
    for given in (frames, list(frames), (frames, {"frames_indices": list(range(6))})):
        plain = asked(family, given)
        rate, times = used(plain)["assumed_fps"], used(plain)["timestamps_s"]
        # Frames that are told to have that rate are the same to the model, and others are not.
        places = [round(time * rate) for time in times]
        told = asked(family, (frames[places], {"fps": rate, "frames_indices": places, "total_num_frames": 6}))
        assert "assumed_fps" not in used(told)
        assert used(told)["timestamps_s"] == times
        assert_same(plain, told)
        other = asked(family, (frames[places], {"fps": rate / 40, "frames_indices": places, "total_num_frames": 6}))
        assert (other.token_ids, other.spans[0].item.layout) != (plain.token_ids, plain.spans[0].item.layout) or (
            family == "ernie4_5_vl_moe"
        )


@pytest.mark.parametrize("family", GLM)
def test_a_rate_is_also_assumed_where_frames_are_taken_as_they_are(family: str) -> None:
    plain = asked(family, tiny.frames(6), do_sample_frames=False)
    assert used(plain)["assumed_fps"] == 24.0
    assert_same(plain, asked(family, (tiny.frames(6), {"fps": 24.0, "frames_indices": list(range(6))})))


@pytest.mark.parametrize("family", UNTIMED)
def test_nothing_is_assumed_of_frames_whose_times_the_model_is_not_told(family: str) -> None:
    plain = asked(family, tiny.frames(6))
    assert not {"assumed_fps", "timestamps_s"} & used(plain).keys()
    for rate in (0.5, 24.0):
        assert_same(plain, asked(family, (tiny.frames(6), {"fps": rate})))


@pytest.mark.parametrize("family", tiny.VIDEO_FAMILIES)
def test_a_rate_alone_is_told_of_frames(family: str) -> None:
    """SmolVLM's processor refused times without places."""
    told = asked(family, (tiny.frames(4), {"fps": 2.0}), do_sample_frames=False)
    assert used(told)["timestamps_s"] == (0.0, 0.5, 1.0, 1.5)
    assert_same(told, asked(family, (tiny.frames(4), {"fps": 2.0, "frames_indices": list(range(4))})))
    # As an option, it can mean nothing else.
    assert_same(told, asked(family, tiny.frames(4), fps=2.0, do_sample_frames=False))


@pytest.mark.parametrize("family", ["gemma4", "gemma4_dense"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_fewer_frames_than_the_processor_would_take_are_all_taken(family: str, count: int) -> None:
    for given in (tiny.frames(count), list(tiny.frames(count))):
        assert_same(asked(family, given), asked(family, given, do_sample_frames=False))
    whole = {"fps": 2.0, "frames_indices": list(range(count))}
    told = asked(family, (tiny.frames(count), {"fps": 2.0}))
    assert used(told)["frames"] == count
    assert_same(told, asked(family, (tiny.frames(count), whole)))


@pytest.mark.parametrize("family", tiny.VIDEO_FAMILIES)
def test_a_number_of_frames_is_a_bound(family: str) -> None:
    told = asked(family, (tiny.frames(4), {"fps": 1.0}), num_frames=20, do_sample_frames=True)
    assert used(told)["frames"] == 4
    assert not told.receipts[0].lost or "left out" not in str(told.receipts[0].lost)


@pytest.mark.parametrize("family", [name for name in tiny.VIDEO_FAMILIES if name not in OWN_PROCESSOR])
@pytest.mark.parametrize("options", [{"num_frames": 4}, {"fps": 1.0}], ids=str)
def test_a_processor_that_chooses_chooses_what_transformers_does(family: str, options: dict[str, Any]) -> None:
    given = (tiny.frames(12), {"fps": 2.0})
    mine = asked(family, given, do_sample_frames=True, **options)
    part = pipes.shared(family)._processor.loaded().video_processor
    # Of two ways to say how many, a processor's own must not stand against the one that is told.
    alone = {"num_frames": None, "fps": None} | options
    known = {"total_num_frames": 12, "fps": 2.0, "duration": 6.0}
    theirs = part([given[0]], video_metadata=[known], do_sample_frames=True, return_metadata=True, **alone)
    places = [int(index) for index in theirs["video_metadata"][0].frames_indices]
    assert 0 < len(places) <= 12
    times = tuple(place / 2.0 for place in places)
    assert used(mine)["timestamps_s"] == times
    assert_same(mine, asked(family, (given[0][places], known | {"frames_indices": places, "video_backend": None})))


@pytest.mark.parametrize("family", tiny.VIDEO_FAMILIES)
def test_an_option_that_does_nothing_is_told_and_one_that_chooses_is_not(family: str) -> None:
    given = (tiny.frames(12), {"fps": 2.0})
    plain = None
    if family in CHOOSING or family in GLM:
        plain = asked(family, given, do_sample_frames=True)
    for option in ({"num_frames": 4}, {"fps": 1.0}):
        told = asked(family, given, do_sample_frames=True, **option)
        if "options_without_effect" in used(told):
            assert used(told)["options_without_effect"] == list(option)
            assert plain is not None
            assert_same(told, plain)
        elif plain is not None:
            assert told.token_ids != plain.token_ids or family == "gemma4" or family == "gemma4_dense"
    if family in GLM:
        dropped = used(asked(family, given, do_sample_frames=True, num_frames=4))
        assert dropped["options_without_effect"] == ["num_frames"]
    if family.startswith("gemma4"):
        dropped = used(asked(family, given, do_sample_frames=True, fps=1.0))
        assert dropped["options_without_effect"] == ["fps"]


@NEEDS_MOLMO
def test_a_rate_that_times_frames_is_not_without_effect() -> None:
    """Molmo 2 takes it for the rate of the frames, and then takes all of them."""
    told = used(asked("molmo2", tiny.frames(6), fps=1.0))
    assert "options_without_effect" not in told
    assert told["timestamps_s"] == (0.0, 1.0, 2.0, 3.0, 4.0, 5.0)


@pytest.mark.parametrize("family", tiny.VIDEO_FAMILIES)
def test_two_ways_to_say_how_many_are_refused_in_our_words_or_one_is_named(family: str) -> None:
    given, both = (tiny.frames(12), {"fps": 2.0}), {"num_frames": 4, "fps": 1.0}
    if family in GLM or family in ("interns1", "internvl", "smolvlm"):
        told = used(asked(family, given, do_sample_frames=True, **both))
        assert family == "smolvlm" or told["options_without_effect"]
        return
    with pytest.raises(MediaError) as caught:
        asked(family, given, do_sample_frames=True, **both)
    assert "mutually" not in str(caught.value)
    assert caught.value.remedy == "Give one of them."
    # What the remedy says helps.
    for name, value in both.items():
        asked(family, given, do_sample_frames=True, **{name: value})


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "internvl"])
def test_a_choice_that_cannot_be_made_is_refused_with_what_helps(family: str) -> None:
    with pytest.raises(MediaError, match="cannot sample the 6 frames") as caught:
        asked(family, tiny.frames(6), do_sample_frames=True)
    assert "num_frames" in caught.value.remedy
    assert used(asked(family, tiny.frames(6), do_sample_frames=True, num_frames=4))["frames"] == 4
    assert used(asked(family, (tiny.frames(6), {"fps": 2.0}), do_sample_frames=True, fps=2.0))["frames"] == 6


@pytest.mark.parametrize("family", tiny.VIDEO_FAMILIES)
def test_a_file_is_not_chosen_from_twice(family: str, tmp_path: Path) -> None:
    pipes.write_video(tmp_path / "v.mp4", tiny.frames(12))
    data = (tmp_path / "v.mp4").read_bytes()
    plain = asked(family, data, num_frames=4)
    told = asked(family, data, num_frames=4, do_sample_frames=True)
    assert used(told)["options_without_effect"] == ["do_sample_frames"]
    assert_same(plain, told)


def test_frames_with_places_can_be_chosen_from_on_demand() -> None:
    places = [0, 10, 20, 30, 40, 50]
    given = (tiny.frames(6), {"fps": 10.0, "frames_indices": places, "total_num_frames": 60})
    told = asked("qwen3_vl", given, do_sample_frames=True, num_frames=4)
    assert used(told)["timestamps_s"] == (0.0, 2.0, 3.0, 5.0)
    taken = {"fps": 10.0, "frames_indices": [0, 20, 30, 50], "total_num_frames": 60}
    assert_same(told, asked("qwen3_vl", (tiny.frames(6)[[0, 2, 3, 5]], taken)))


@pytest.mark.parametrize("family", tiny.VIDEO_FAMILIES)
def test_a_rate_without_effect_changes_no_positions(family: str) -> None:
    """Qwen-Omni's processor would take it for the rate of frames whose times are known."""
    given = (tiny.frames(6), {"fps": 2.0, "frames_indices": list(range(6))})
    assert_same(asked(family, given), asked(family, given, fps=1.0))


@NEEDS_MOLMO
def test_one_frame_can_be_chosen() -> None:
    """Molmo 2's own choice of one frame loses a dimension."""
    assert used(asked("molmo2", tiny.frames(1)))["frames"] == 1
    assert used(asked("molmo2", tiny.frames(5), num_frames=1))["frames"] == 1


def test_a_bound_that_the_processor_does_not_mind_is_refused_with_one_that_it_does() -> None:
    given = (tiny.frames(12), {"fps": 2.0})
    with pytest.raises(MediaError, match="max_frames is 4, but the processor sampled") as caught:
        asked("qwen3_vl", given, do_sample_frames=True, max_frames=4)
    assert "num_frames" in caught.value.remedy
    assert used(asked("qwen3_vl", given, do_sample_frames=True, num_frames=4))["frames"] == 4


def test_times_are_given_beside_the_frames() -> None:
    with pytest.raises(ParamsError, match="no option 'video_metadata'") as caught:
        asked("qwen3_vl", np.asarray(tiny.frames(6)), video_metadata=[{"fps": 2.0}])
    assert caught.value.remedy.startswith("Give it together with the frames")


def test_some_of_more_frames_are_refused_where_their_places_must_be_known() -> None:
    given = (tiny.frames(4), {"fps": 2.0, "total_num_frames": 8})
    with pytest.raises(MediaError) as caught:
        asked("smolvlm", given)
    assert caught.value.remedy == "Set frames_indices to the indices of these 4 frames among the video's 8."
    given[1]["frames_indices"] = [0, 2, 4, 6]
    assert used(asked("smolvlm", given))["timestamps_s"] == (0.0, 1.0, 2.0, 3.0)


def test_videos_of_unlike_lengths_are_told_of_by_their_own_number_of_frames() -> None:
    """transformers fills the shorter one up, and tells of it by the number of the longer one."""
    clips = [(tiny.frames(3), {"fps": 2.0}), (tiny.frames(6), {"fps": 2.0})]
    pipe = pipes.shared("smolvlm")
    items = [pipes.ask(pipe, "smolvlm", videos=clip).spans[0].item for clip in clips]
    both = [span.item for span in pipes.ask(pipe, "smolvlm", videos=clips).spans]
    alone = [(item.lead, item.replacement_ids, item.tail) for item in items]
    assert [(item.lead, item.replacement_ids, item.tail) for item in both] == alone
    assert ["three frames" in lead for lead, _, _ in alone] == [True, False]


@pytest.mark.parametrize("family", tiny.VIDEO_FAMILIES)
@pytest.mark.parametrize(
    "options", [{"num_frames": 0}, {"num_frames": -2}, {"fps": 0}, {"fps": -1.0}, {"fps": float("nan")}], ids=str
)
def test_numbers_that_mean_nothing_are_refused(family: str, options: dict[str, Any]) -> None:
    """Some processors divided by them, others took one frame."""
    for given in (tiny.frames(4), (tiny.frames(4), {"fps": 2.0})):
        for sampled in (True, False):
            with pytest.raises(ParamsError, match="must be a"):
                asked(family, given, do_sample_frames=sampled, **options)
    with pytest.raises(ConfigError, match="must be a"):
        pipes.make(family, mm_processor_kwargs=options)


@pytest.mark.parametrize("family", tiny.VIDEO_FAMILIES)
def test_all_frames_are_said_as_for_files(family: str) -> None:
    told = asked(family, (tiny.frames(5), {"fps": 2.0}), num_frames=-1, do_sample_frames=True)
    assert used(told)["frames"] == 5


def test_metadata_that_cannot_be_are_refused_with_what_helps() -> None:
    for wrong in ({"fps": 0}, {"fps": float("nan")}, {"total_num_frames": 2}, {"frames_indices": [0]}):
        with pytest.raises(MediaError) as caught:
            asked("qwen2_vl", (tiny.frames(4), {"fps": 2.0} | wrong))
        assert caught.value.remedy
    # One frame four times, as samplers fill up.
    assert used(asked("qwen2_vl", (tiny.frames(4), {"fps": 2.0, "frames_indices": [0, 0, 0, 0]})))["frames"] == 4


@pytest.mark.parametrize("family", tiny.VIDEO_FAMILIES)
@pytest.mark.parametrize("options", [{"num_frames": 10**9}, {"fps": 1e9}], ids=str)
def test_a_large_number_takes_no_memory(family: str, options: dict[str, Any]) -> None:
    """GLM's rule writes a list of as many numbers as a rate gives, Qwen3-VL's an array of so many frames."""
    told = asked(family, (tiny.frames(5), {"fps": 2.0}), do_sample_frames=True, **options)
    assert used(told)["frames"] <= 5
