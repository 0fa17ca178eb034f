"""The renderer is deterministic, and what the answers say is what the pictures show."""

from __future__ import annotations

import re
from itertools import pairwise
from random import Random

import numpy as np
import pytest

from training.mote.checkpoint import build_tokenizer, read_words
from training.mote.describe import describe, describe_clip, tell_motion, tell_pictures
from training.mote.questions import ask_attribute, ask_clip, ask_description, ask_scenes, ask_text
from training.mote.render import render
from training.mote.sample import Clip, render_clip, sample_clip, sample_scene
from training.mote.scene import SIZES, Background, Scene, Shape, distance
from training.mote.shard import make_shard
from training.mote.words import LONGEST, readable, sample_text

WHITE = Background("plain", ((255, 255, 255),), 1)
RED, BLUE = (220, 20, 20), (30, 60, 210)


def shape(kind: str, colour: str, x: float, y: float, size: str = "medium") -> Shape:
    return Shape(kind, colour, size, x, y, sum(SIZES[size]) / 2, RED if colour == "red" else BLUE)


@pytest.mark.parametrize("kind", ["shapes", "text", "both", "few", "nothing"])
def test_same_seed_same_picture(kind: str) -> None:
    first, again, other = (sample_scene(Random(seed), kind) for seed in (3, 3, 4))
    assert first == again != other
    assert np.array_equal(np.asarray(render(first)), np.asarray(render(again)))


def test_same_seed_same_shard() -> None:
    tokenizer = build_tokenizer(read_words())
    first, again = make_shard(tokenizer, 11, 200), make_shard(tokenizer, 11, 200)
    assert np.array_equal(first.picture_patches, again.picture_patches)
    assert np.array_equal(first.clip_patches, again.clip_patches)
    assert [d.ids.tolist() for d in first.dialogues] == [d.ids.tolist() for d in again.dialogues]


def test_each_shape_shows_its_colour_where_it_is_said_to_stand() -> None:
    rng, seen = Random(8), 0
    for _ in range(40):
        scene = sample_scene(rng, "shapes", 400)
        pixels = np.asarray(render(scene)).astype(float)
        for item in scene.told:
            covered = scene.overlap is not None and item == scene.overlap[1]
            column, row = int(item.x * scene.width), int(item.y * scene.height)
            patch = pixels[max(0, row - 1) : row + 2, max(0, column - 1) : column + 2].reshape(-1, 3).mean(0)
            if not covered:
                assert distance(tuple(patch), item.rgb) < 90, (scene, item)
                seen += 1
    assert seen > 60


def test_scenes_keep_their_margins() -> None:
    rng = Random(9)
    for _ in range(150):
        scene = sample_scene(rng, "shapes", 400)
        root = (scene.width * scene.height) ** 0.5
        for item in scene.told:
            low, high = SIZES[item.size]
            assert low <= item.extent <= high
            for value, length in ((item.x, scene.width), (item.y, scene.height)):
                half = item.extent * root / length / 2
                assert half <= value <= 1 - half
                assert any(a <= value <= b for a, b in ((0, 0.28), (0.4, 0.6), (0.72, 1)))
        columns = [item.x for item in scene.told]
        assert all(right - left >= 0.06 for left, right in pairwise(columns))
        assert len({(item.kind, item.colour) for item in scene.told}) == len(scene.told)


def test_the_description_is_english() -> None:
    circle, square = shape("circle", "red", 0.2, 0.2, "large"), shape("square", "blue", 0.8, 0.8, "small")
    scene = Scene(300, 300, WHITE, (square, circle), None)
    wanted = "A large red circle at the top left and a small blue square at the bottom right. "
    assert describe(scene) == wanted + "The circle is left of the square."
    assert describe(Scene(300, 300, WHITE, (), None)) == "I see no shape and no text that I know."


def test_shapes_of_one_kind_are_named_with_their_colours() -> None:
    first, second = shape("star", "red", 0.4, 0.5), shape("star", "blue", 0.52, 0.55)
    scene = Scene(300, 300, WHITE, (first, second), None, overlap=(second, first))
    assert describe(scene).endswith("The blue star overlaps the red star.")


def test_pictures_are_counted_from_one() -> None:
    assert [tell_pictures(numbers) for numbers in ([], [2], [1, 3])] == [
        "None of them.",
        "Picture 2.",
        "Pictures 1 and 3.",
    ]


def test_the_mover_is_where_the_clip_says() -> None:
    rng, moving = Random(5), 0
    for _ in range(60):
        clip = sample_clip(rng)
        frames = render_clip(clip)
        assert len(frames) == clip.frames
        if clip.mover is None or clip.goal is None:
            assert tell_motion(clip) == "Nothing moves."
            continue
        moving += 1
        dx, dy = clip.goal.x - clip.mover.x, clip.goal.y - clip.mover.y
        assert ("right" in tell_motion(clip)) == (dx > 0.2)
        assert ("left" in tell_motion(clip)) == (dx < -0.2)
        assert ("down" in tell_motion(clip)) == (dy > 0.2)
        assert (" up" in tell_motion(clip)) == (dy < -0.2)
        first, last = (np.asarray(frame).astype(float) for frame in (frames[0], frames[-1]))
        row, column = int(clip.goal.y * clip.scene.height), int(clip.goal.x * clip.scene.width)
        assert distance(tuple(last[row, column]), clip.goal.rgb) < 110
        assert np.abs(first - last).max() > 40
    assert moving > 40


def test_a_still_clip_says_so() -> None:
    clip = Clip(Scene(200, 200, WHITE, (shape("heart", "red", 0.2, 0.5),), None), 4, None, None, "even", None)
    assert describe_clip(clip) == "A red heart stays on the left. Nothing moves."


def test_texts_can_be_read_in_one_way() -> None:
    rng = Random(1)
    for _ in range(2000):
        text = sample_text(rng)
        assert 1 <= len(text) <= LONGEST
        assert readable(text)
        assert not re.search(r"O0|0O|[a-zA-Z][Il]\d|\dI|\dO[^A-Z]?$", text), text
    assert not readable("so")
    assert not readable("thirteen long")
    assert readable("So far")


def test_questions_have_short_plain_answers() -> None:
    rng = Random(2)
    scenes = [sample_scene(rng, kind, 200) for kind in ("shapes", "text", "both", "few", "nothing") for _ in range(8)]
    for scene in scenes:
        for ask in (ask_attribute, ask_description, ask_text):
            exchange = ask(rng, scene)
            assert exchange.answer.endswith(".")
            assert "{" not in exchange.question + exchange.answer
    for _ in range(40):
        exchange = ask_scenes(rng, rng.sample(scenes, 3))
        assert re.fullmatch(r"(.+\.\n?)+", exchange.answer)
    for _ in range(40):
        assert ask_clip(rng, sample_clip(rng)).answer.endswith(".")
