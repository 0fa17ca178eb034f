"""`beheld verify` of every family: nothing differs in any kind of question, and faults are named at their stage."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from torch import Tensor

from beheld.core.config import EngineArgs
from beheld.core.media import MediaRef
from beheld.core.plan import SpanView
from beheld.inputs.media import decode
from beheld.models.hf import HFAdapter
from beheld.runner.encoder_cache import EncoderCache
from beheld.tools.verify.compare import DIFFERENT, SAME, StageVerdict
from beheld.tools.verify.questions import question_of
from beheld.tools.verify.run import Sides
from beheld.tools.verify.trace import Question
from tests import tiny

TOKENS = 5
# Families of whose pictures beheld keeps the keys and values that layers make of them; transformers gives them nowhere.
WITHOUT_ENCODER_STAGE = ("mllama", "florence2")


class Verified:
    """Both sides of a family's tiny checkpoint."""

    def __init__(self, family: str) -> None:
        self.family = family
        self.sides = Sides(EngineArgs(model=str(tiny.checkpoint(family)), media_workers=0))

    def ask(
        self, *images: Any, videos: Any = (), sounds: Any = (), templated: str = "plain"
    ) -> tuple[dict[str, StageVerdict], StageVerdict | None]:
        """All stages by name, and the first that differs."""
        text = "What is it?"
        if templated == "plain":
            marks = [(images, "num_images"), (videos, "num_videos"), (sounds, "num_sounds")]
            placed = "".join(tiny.markers(self.family, **{name: len(items)}) for items, name in marks)
            text = tiny.wrap(self.family, placed + text)
        stages, culprit = self.sides.ask(Question(text, images, templated, TOKENS, videos, sounds))
        return {stage.name: stage for stage in stages}, culprit

    @property
    def most(self) -> int:
        """Pictures to a prompt."""
        return 1 if self.family in tiny.LONE_FAMILIES else 2


@pytest.fixture(scope="module", params=list(tiny.TINY))
def verified(request: pytest.FixtureRequest) -> Iterator[Verified]:
    made = Verified(request.param)
    yield made
    made.sides.close()


def check(verified: Verified, answer: tuple[dict[str, StageVerdict], StageVerdict | None], kind: str = "") -> None:
    stages, culprit = answer
    assert culprit is None, culprit
    same = {"token ids", "logits", "tokens"}
    if verified.family == "florence2":
        # An encoder's prompt enters no decoder.
        same.add("processor's input_ids")
    else:
        same |= {"merged embeddings", "positions"}
    if kind and verified.family not in WITHOUT_ENCODER_STAGE:
        same.add("encoder output")
    if kind == "image":
        same.add("pixel values")
    assert {name for name in same if stages[name].verdict != SAME} == set()


def clip() -> tuple[Any, dict[str, Any]]:
    return tiny.frames(6, 3), {"total_num_frames": 6, "fps": 2.0, "duration": 3.0, "frames_indices": list(range(6))}


def sounds(count: int) -> list[tuple[Any, int]]:
    return [(tiny.sound(0.61, 5 + seed), tiny.SOUND_RATE) for seed in range(count)]


def test_text(verified: Verified) -> None:
    if verified.family in tiny.PICTURE_FAMILIES:
        pytest.skip("requires an image")
    check(verified, verified.ask())


def test_pictures(verified: Verified) -> None:
    if verified.family not in tiny.IMAGE_FAMILIES:
        pytest.skip("takes no pictures")
    # Of different sizes, so that some processors fill the smaller one up.
    check(verified, verified.ask(*tiny.pictures(verified.most)), "image")


def test_a_video(verified: Verified) -> None:
    if verified.family not in tiny.VIDEO_FAMILIES:
        pytest.skip("takes no videos")
    check(verified, verified.ask(videos=(clip(),)), "video")


def test_some_frames_of_a_longer_video(verified: Verified) -> None:
    if verified.family not in tiny.VIDEO_FAMILIES:
        pytest.skip("takes no videos")
    places = [0, 3, 6, 9, 12, 14]
    about = {"total_num_frames": 15, "fps": 29.97, "duration": 15 / 29.97, "frames_indices": places}
    check(verified, verified.ask(videos=((tiny.frames(6, 3), about),)), "video")


def test_pictures_beside_a_video(verified: Verified) -> None:
    """Also in families whose own generate() refuses both in one prompt."""
    if verified.family not in tiny.VIDEO_FAMILIES or verified.family not in tiny.IMAGE_FAMILIES:
        pytest.skip("takes no pictures beside videos")
    answer = verified.ask(*tiny.pictures(2), videos=(clip(),))
    check(verified, answer, "image")
    assert "encoder output of video" not in answer[0] or answer[0]["encoder output of video"].verdict == SAME


def test_sounds(verified: Verified) -> None:
    if verified.family not in tiny.SOUND_FAMILIES:
        pytest.skip("hears nothing")
    check(verified, verified.ask(sounds=sounds(2)), "audio")


def test_a_conversation(verified: Verified) -> None:
    family = verified.family
    if family in tiny.CHATLESS_FAMILIES:
        pytest.skip("transformers has no chat template for it")
    images = tiny.pictures(verified.most) if family in tiny.IMAGE_FAMILIES else []
    heard = sounds(1) if family in tiny.SOUND_FAMILIES and not images else []
    answer = verified.ask(*images, sounds=heard, templated="chat")
    check(verified, answer, "image" if images else "audio" if heard else "")
    assert answer[0]["rendered prompt"].verdict == SAME


def test_the_question_that_the_command_asks(verified: Verified, tmp_path: Path) -> None:
    """Where transformers has no template, ours is used, if it takes images: that of the checkpoint's variant."""
    if verified.family not in tiny.CHATLESS_FAMILIES:
        pytest.skip("test_a_conversation asks that")
    media = []
    if verified.family in tiny.IMAGE_FAMILIES:
        tiny.picture(84, 56, 3).save(tmp_path / "image.png")
        media = [MediaRef("image", tmp_path / "image.png")]
    args = EngineArgs(model=str(tiny.checkpoint(verified.family)))
    question = question_of(args, media, text=None, prompt=None, max_tokens=TOKENS)
    _, culprit = verified.sides.ask(question)
    assert culprit is None


@pytest.mark.parametrize("orientation", [3, 6])
def test_a_picture_that_is_not_turned(
    verified: Verified, orientation: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if verified.family not in tiny.IMAGE_FAMILIES:
        pytest.skip("takes no pictures")
    exif = Image.Exif()
    exif[0x0112] = orientation
    tiny.picture(120, 80, 70 + orientation).save(tmp_path / "turned.png", exif=exif)
    monkeypatch.setattr(decode, "_upright", lambda image: (image, 1))
    stages, culprit = verified.ask(tmp_path / "turned.png")
    assert culprit is not None
    assert stages["pixel values"].verdict == DIFFERENT
    if orientation == 3:
        assert culprit.name == "pixel values"
    else:
        # Where a picture lying on its side takes other places in the prompt, these differ before.
        places = stages["token ids"].verdict == DIFFERENT
        assert culprit.name == ("token ids" if places else "pixel values")
    monkeypatch.undo()
    exif[0x0112] = orientation - 1
    tiny.picture(120, 80, 70 + orientation).save(tmp_path / "turned.png", exif=exif)
    check(verified, verified.ask(tmp_path / "turned.png"), "image")


def test_swapped_pictures(verified: Verified, monkeypatch: pytest.MonkeyPatch) -> None:
    if verified.family not in tiny.IMAGE_FAMILIES or verified.most < 2:
        pytest.skip("takes no two pictures")
    if verified.family == "mllama":
        pytest.skip("its layers attend to pictures beside the text")
    right, pair = EncoderCache._source, [tiny.picture(84, 56, 31), tiny.picture(84, 56, 32)]

    def wrong(self: EncoderCache, span: SpanView) -> Tensor:
        seen.append(span.digest)
        others = [digest for digest in self._embeds if digest != span.digest and digest in mine]
        return self._embeds[others[0]] if others else right(self, span)

    seen: list[bytes] = []
    mine: set[bytes] = set()
    monkeypatch.setattr(EncoderCache, "_source", wrong)
    assert verified.ask(*pair)[1] is None
    mine.update(seen)
    _, culprit = verified.ask(*pair)
    assert culprit is not None
    assert culprit.name == "merged embeddings"


@pytest.mark.parametrize("family", ["llava", "blip2", "llama4"])
def test_positions_that_are_shifted_throughout(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotary ones tell distances alone; learned ones, and queries that grow with theirs, tell places."""
    right = HFAdapter.positions

    def wrong(self: HFAdapter, *prompt: Any) -> tuple[Any, int]:
        positions, delta = right(self, *prompt)
        return positions + 1, delta + 1

    monkeypatch.setattr(HFAdapter, "positions", wrong)
    shifted = Verified(family)
    try:
        stages, culprit = shifted.ask(tiny.picture(84, 56, 3))
    finally:
        shifted.sides.close()
    if family == "llava":
        assert culprit is None
        assert "does not change relative positions" in stages["positions"].detail
    else:
        assert culprit is not None
        assert culprit.name == "positions"


def test_a_wrong_video_beside_a_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    joined = Verified("glm4v")
    right = EncoderCache._source
    try:
        monkeypatch.setattr(EncoderCache, "_source", lambda self, span: right(self, span).flip(0))
        _, culprit = joined.ask(tiny.picture(84, 56, 3), videos=(clip(),))
    finally:
        joined.sides.close()
    assert culprit is not None
    assert culprit.name == "merged embeddings"
