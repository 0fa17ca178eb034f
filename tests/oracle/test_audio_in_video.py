"""A video read together with its audio, as transformers' processors and models of Qwen-Omni interleave the two."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from beheld import LLM, SamplingParams
from beheld.core.outputs import RequestOutput
from tests import tiny
from tests.oracle import cases, reference
from tests.oracle.cases import Clip

OPTION = {"use_audio_in_video": True}
PARAMS = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, logprobs=1)


@dataclass(frozen=True)
class Heard:
    """A prompt: {i}, {v}, {a} stand for an image, a video with its audio, and audio alone, in the given order.

    `audio` has one entry of (seconds, seed) for each {v} and each {a}.
    """

    content: str
    videos: tuple[Clip, ...]
    audio: tuple[tuple[float, int], ...]
    images: tuple[tuple[int, int, int], ...] = ()

    def prompt(self, family: str) -> str:
        text = self.content
        for mark, count in (("{i}", {"num_images": 1}), ("{v}", {"num_videos": 1}), ("{a}", {"num_sounds": 1})):
            text = text.replace(mark, tiny.markers(family, **count))
        return tiny.wrap(family, text)

    @property
    def waves(self) -> list[Any]:
        return [tiny.sound(*each) for each in self.audio]

    @property
    def owners(self) -> list[int | None]:
        """For each audio, its video."""
        marks = [self.content[at + 1] for at, letter in enumerate(self.content) if letter == "{"]
        found: list[int | None] = []
        for mark in marks:
            found += [] if mark == "i" else [None] if mark == "a" else [sum(each is not None for each in found)]
        return found

    def given(self, family: str) -> dict[str, Any]:
        data: dict[str, Any] = {
            "video": [(clip.array, clip.metadata) for clip in self.videos],
            "audio": [(wave, tiny.SOUND_RATE) for wave in self.waves],
        }
        if self.images:
            data["image"] = [tiny.picture(*each) for each in self.images]
        return {"prompt": self.prompt(family), "multi_modal_data": data, "mm_processor_kwargs": OPTION}

    def inputs(self, family: str) -> dict[str, Any]:
        more = {"images": [[tiny.picture(*each) for each in self.images]]} if self.images else {}
        made = reference.processor(family)(
            text=[self.prompt(family)],
            videos=[clip.array for clip in self.videos],
            video_metadata=[clip.metadata for clip in self.videos],
            do_sample_frames=False,
            fps=self.videos[0].fps,
            audio=self.waves,
            audio_kwargs={"sampling_rate": tiny.SOUND_RATE},
            audio_from_video_indices=self.owners,
            load_audio_from_video=True,
            return_tensors="pt",
            **more,
        )
        return dict(made.to(torch.float32)) | OPTION


HEARD = {
    "one": Heard("{v}What?", (Clip(8, 1, fps=2.0),), ((4.0, 1),)),
    "audio is longer": Heard("{v}What?", (Clip(4, 2, fps=2.0),), ((5.3, 2),)),
    "video is longer": Heard("{v}What?", (Clip(12, 3, fps=2.0),), ((1.7, 3),)),
    "fractions": Heard("{v}What?", (Clip(8, 4, fps=3.0),), ((2.5, 4),)),
    "gaps": Heard("{v}What?", (Clip(8, 5, fps=0.35),), ((9.0, 5),)),
    "two": Heard("{v}and{v}Which?", (Clip(6, 6, fps=2.0), Clip(4, 7, fps=2.0)), ((3.0, 6), (2.2, 7))),
    # Of one length: with other audio in its prompt, transformers pads Qwen3-Omni's, and that changes it.
    "with others": Heard("{a}{i}{v}{a}Which?", (Clip(6, 8, fps=2.0),), ((1.9, 8), (1.9, 9), (1.9, 10)), ((84, 56, 1),)),
}


def same(output: RequestOutput, family: str, heard: Heard) -> None:
    expected = reference.answered(reference.model(family), heard.inputs(family), max_tokens=9)
    assert tuple(output.prompt_token_ids or ()) == expected.prompt_ids
    got = output.outputs[0]
    assert tuple(got.token_ids) == expected.token_ids
    said = [step[token].logprob for step, token in zip(got.logprobs or (), got.token_ids, strict=True)]
    assert said == pytest.approx(expected.logprobs, abs=1e-4)


@pytest.fixture(scope="module", params=[(family, name) for family in tiny.THINKERS for name in ("roomy", "cut")])
def engine(request: pytest.FixtureRequest) -> Any:
    family, name = request.param
    room = cases.options(family, name) | {"max_model_len": 4096}
    with LLM(model=str(tiny.checkpoint(family)), dtype="float32", seed=0, disable_log_stats=True, **room) as llm:
        yield family, llm


@pytest.mark.parametrize("case", HEARD)
def test_a_video_with_its_audio_equals_transformers(engine: tuple[str, LLM], case: str) -> None:
    family, llm = engine
    (output,) = llm.generate([HEARD[case].given(family)], PARAMS, use_tqdm=False)
    same(output, family, HEARD[case])


def test_all_at_once_and_again(engine: tuple[str, LLM]) -> None:
    family, llm = engine
    for _ in range(2):
        outputs = llm.generate([heard.given(family) for heard in HEARD.values()], PARAMS, use_tqdm=False)
        for output, heard in zip(outputs, HEARD.values(), strict=True):
            same(output, family, heard)


def test_what_is_heard_changes_the_answer(engine: tuple[str, LLM]) -> None:
    family, llm = engine
    asked = [Heard("{v}What?", (Clip(8, 1, fps=2.0),), ((4.0, seed),)).given(family) for seed in (1, 2)]
    frames = {"video": asked[0]["multi_modal_data"]["video"]}
    asked.append({"prompt": asked[0]["prompt"], "multi_modal_data": frames})
    outputs = llm.generate(asked, PARAMS, use_tqdm=False)
    first = [(output.outputs[0].logprobs or [])[0] for output in outputs]
    said = [max(entry.logprob for entry in step.values()) for step in first]
    assert min(abs(a - b) for a, b in ((said[0], said[1]), (said[0], said[2]), (said[1], said[2]))) > 1e-3
