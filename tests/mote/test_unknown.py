"""mote says of pictures of anything else that it does not know them, and only of those; how it learns that."""

from __future__ import annotations

import io
import re
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageFilter
from transformers import Qwen2VLForConditionalGeneration

from beheld import mote
from tests.mote.shipped import model, processor
from training.mote import last_layer, teach_unknown
from training.mote.checkpoint import build_tokenizer, read_words
from training.mote.dialogue import Media, Writer, write_dialogue
from training.mote.drawn import draw_plainly
from training.mote.evaluate import Case, answer, processed
from training.mote.gather import inside
from training.mote.patches import picture_patches
from training.mote.questions import Exchange
from training.mote.scene import distance
from training.mote.unknown import DRAWN, photo_files, photograph, screenshot, texture, unknown

EXAMPLES = Path(__file__).parents[2] / "examples"


def noise() -> Image.Image:
    return Image.fromarray(np.random.default_rng(7).integers(0, 256, (240, 320, 3), dtype=np.uint8))


def weave() -> Image.Image:
    y, x = np.mgrid[0:240, 0:320].astype(np.float32)
    threads = np.stack([np.sin(x / 3 + k) * np.cos(y / 4 - k) for k in range(3)], axis=2)
    return Image.fromarray((127 + 90 * threads).astype(np.uint8)).filter(ImageFilter.GaussianBlur(0.6))


def ask(picture: Image.Image, *questions: str) -> list[str]:
    cases = [Case(Exchange("unknown", words, ""), [picture], [], words, None, False) for words in questions]
    made = answer(model(), [processed(processor(), "unknown", case) for case in cases])
    return [processor().tokenizer.decode(ids, skip_special_tokens=True) for ids in made]


@pytest.mark.parametrize("draw", [noise, lambda: screenshot(Random(12))], ids=["noise", "screenshot"])
def test_what_it_was_not_made_for_gets_one_sentence_whatever_is_asked(draw: Any) -> None:
    questions = ("What is this?", "How many people are there?", "What does the text say?", "Is there a red circle?")
    assert ask(draw(), *questions) == [mote.UNKNOWN] * 4


def test_what_is_drawn_and_printed_is_answered() -> None:
    shapes = Image.new("RGB", (320, 240), "white")
    ImageDraw.Draw(shapes).ellipse((120, 80, 200, 160), fill=(210, 30, 30))
    colour, count = ask(shapes, "What colour is the circle?", "How many shapes are there?")
    assert "red" in colour.lower()
    assert "one shape" in count.lower()
    empty = Image.new("RGB", (320, 240), (90, 140, 200))
    assert ask(empty, "What is this?") == ["I see no shape and no text that I know."]
    assert mote.UNKNOWN not in ask(Image.open(EXAMPLES / "sign.png").convert("RGB"), "Read the text.", "What is this?")


def test_drawings_are_what_their_scenes_say() -> None:
    rng = Random(2)
    made = [draw_plainly(rng) for _ in range(60)]
    assert {len(scene.shapes) for scene, _ in made} == {0, 1, 2}
    for scene, image in made:
        assert image.size == (scene.width, scene.height)
        ground = scene.background.palette[0]
        colours = {colour for _, colour in image.getcolors(1 << 20) or ()}
        assert (colours == {ground}) == (not scene.shapes and scene.label is None)
        for shape in scene.shapes:
            at = image.getpixel((int(shape.x * scene.width), int(shape.y * scene.height)))
            assert isinstance(at, tuple)
            assert distance((at[0], at[1], at[2]), shape.rgb) < 12, shape


@cache
def items() -> list[last_layer.Item]:
    """Two dialogues about pictures of other things, at the border of the last layer."""
    stills = [picture_patches(picture) for picture in (noise(), weave())]
    writer, rng, dialogues = Writer(build_tokenizer(read_words())), Random(3), []
    for index, (_, grid) in enumerate(stills):
        about = teach_unknown.ask_unknown(rng, "one", 2)
        assert {exchange.answer for exchange in about} == {mote.UNKNOWN}
        dialogues.append(write_dialogue(writer, rng, [Media(index, False, grid)], about))
    return last_layer.entered(model(), dialogues, teach_unknown.seen_by(model(), stills, []), 2)


def test_scenes_that_pass_for_other_things_are_empty_or_overlap() -> None:
    stills, dialogues = teach_unknown.tell_rare(4)
    texts = [processor().tokenizer.decode(dialogue.ids.tolist()) for dialogue in dialogues]
    assert len(stills) == len(texts) == teach_unknown.PICTURES
    assert all("I see no shape" in text for text in texts[::2])
    assert not any("I see no shape" in text for text in texts[1::2])
    assert all(re.search("overlap|front|cover|on top", text) for text in texts[1::2])


@torch.no_grad()
def test_training_sees_what_inference_sees() -> None:
    picture = noise()
    patches, grid = picture_patches(picture)
    writer, exchange = Writer(build_tokenizer(read_words())), Exchange("description", "What is this?", mote.UNKNOWN)
    dialogue = write_dialogue(writer, Random(1), [Media(0, False, grid)], [exchange], media_last=True)
    seen = teach_unknown.seen_by(model(), [(patches, grid)], [])
    (item,) = last_layer.entered(model(), [dialogue], seen, 1)
    text = processor().tokenizer.decode(dialogue.ids.tolist(), skip_special_tokens=False)
    text = re.sub(r"(<\|image_pad\|>)+", r"\1", text)
    inputs = processor()(text=[text], images=[picture], return_tensors="pt", return_mm_token_type_ids=True)
    wanted = model()(**inputs).logits[0, item.learned].log_softmax(-1)
    likely = wanted > -6
    # What enters the layer is kept in half precision, and the two resizers differ in the last bit.
    assert (last_layer.answered(model(), [item]) - wanted)[likely].abs().max() < 0.1


@torch.no_grad()
def test_a_batch_gives_what_its_items_give() -> None:
    alone = torch.cat([last_layer.answered(model(), [item]) for item in items()])
    assert (last_layer.answered(model(), items()) - alone).abs().max() < 1e-3


@torch.no_grad()
def test_a_model_does_not_diverge_from_itself() -> None:
    assert abs(last_layer.divergence(model(), items()).item()) < 1e-3
    right, before, asked = last_layer.right_answers(model(), items())
    assert right == before
    assert asked == 4


def test_what_makes_the_answer_likelier_lowers_the_loss() -> None:
    layer = deepcopy(model())
    layer.requires_grad_(False).model.language_model.layers[-1].requires_grad_(True)
    strangers = [replace(item, wanted=item.wanted.roll(1)) for item in items()]
    best = torch.optim.SGD([weight for weight in layer.parameters() if weight.requires_grad], lr=0.01)
    losses = []
    for _ in range(4):
        loss = last_layer.entropy(layer, strangers)
        losses.append(loss.item())
        best.zero_grad()
        loss.backward()
        best.step()
    assert losses[-1] < losses[0]


def test_only_what_was_learned_is_written_anew(tmp_path: Path) -> None:
    # Other names end like the last norm's.
    names = ["model.language_model.layers.3.mlp.up_proj.weight", "model.language_model.norm.weight"]
    learned = {name: dict(model().named_parameters())[name] + 1.0 for name in names}
    teach_unknown.write(tmp_path, learned, mote.path())
    written = Qwen2VLForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float32)
    before = dict(model().named_parameters())
    changed = [name for name, weight in written.named_parameters() if not torch.equal(weight, before[name])]
    assert sorted(changed) == names
    assert (tmp_path / "config.json").read_bytes() == (mote.path() / "config.json").read_bytes()


def test_pictures_of_a_folder_are_the_same_for_a_seed_and_cut_out_ones_are_laid_on_something(tmp_path: Path) -> None:
    noise().save(tmp_path / "whole.png")
    cut = np.zeros((80, 90, 4), np.uint8)
    cut[20:60, 20:70] = (200, 90, 30, 255)
    Image.fromarray(cut).save(tmp_path / "cut.png")
    photos = photo_files(tmp_path)
    assert [path.name for path in photos[0]] == ["cut.png", "whole.png"]
    for draw in (*DRAWN, lambda rng: photograph(rng, photos), lambda rng: unknown(rng, photos)):
        first, again = draw(Random(5)), draw(Random(5))
        assert first.mode == "RGB"
        assert np.array_equal(np.asarray(first), np.asarray(again))


def test_textures_are_not_the_noise_that_the_ground_of_a_scene_may_be() -> None:
    # Neighbours in noise differ by about its deviation: waves so fine that they alias are noise.
    for seed in (8, 9, 13):
        pixels = np.asarray(texture(Random(seed))).astype(np.float32)
        assert np.abs(np.diff(pixels, axis=1)).mean() < 0.4 * pixels.std()


def test_pictures_within_other_files_are_found() -> None:
    file = io.BytesIO()
    noise().save(file, "WEBP")
    found = list(inside(b"qres" + file.getvalue() + b"RIFFxxxx" + file.getvalue() + b"end"))
    assert [Image.open(io.BytesIO(data)).size for data in found] == [(320, 240)] * 2
