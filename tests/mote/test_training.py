"""Training sees exactly what inference sees: the same pixels, tokens, positions and logits."""

from __future__ import annotations

import re
from functools import cache
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from tests.mote.shipped import model, processor
from training.mote.checkpoint import IMAGE_PIXELS, build_tokenizer, read_words
from training.mote.dialogue import Dialogue, Media, Writer, write_dialogue
from training.mote.forward import predict, see
from training.mote.learn import prepare, score
from training.mote.muon import Muon, orthogonal
from training.mote.patches import clip_patches, picture_patches, target_size
from training.mote.questions import Exchange, ask_clip, ask_scenes
from training.mote.render import render
from training.mote.sample import render_clip, sample_clip, sample_scene
from training.mote.shard import Shard
from training.mote.supply import Loaded, load

CPU = torch.device("cpu")


def pixels_of(flat: np.ndarray) -> torch.Tensor:
    """8-bit patches as the processor gives them: normalised, a picture's twice in time."""
    values = (torch.from_numpy(flat).view(len(flat), 3, -1, 100).float() / 255 - 0.5) / 0.25
    return values.expand(-1, -1, 2, -1).reshape(len(flat), 600)


@cache
def sample() -> tuple[Loaded, list[Any], list[Any]]:
    """A shard of two pictures and one clip with a dialogue about each, and the media themselves."""
    rng = Random(4)
    scenes = [sample_scene(rng, "few", 200) for _ in range(2)]
    pictures = [render(scene) for scene in scenes]
    clip = sample_clip(rng, 160)
    moving = render_clip(clip)
    flat, grids = zip(*(picture_patches(image) for image in pictures), strict=True)
    clip_flat, clip_grid = clip_patches(moving)
    writer = Writer(build_tokenizer(read_words()))
    media = [Media(index, False, grid) for index, grid in enumerate(grids)]
    about = [ask_scenes(rng, scenes) for _ in range(2)]
    dialogues = (
        write_dialogue(writer, Random(1), media, about),
        write_dialogue(writer, Random(6), [Media(0, True, clip_grid)], [ask_clip(rng, clip)], media_last=True),
    )
    shard = Shard(np.concatenate(flat), np.array(grids), clip_flat, np.array([clip_grid]), dialogues)
    return load(shard, CPU), pictures, moving


def whole_text(dialogue: Dialogue, segment: int) -> tuple[str, np.ndarray]:
    """What a user would send for one segment, and which tokens of the dialogue that is."""
    keep = (dialogue.segments == 0) | (dialogue.segments == segment)
    text = processor().tokenizer.decode(dialogue.ids[keep].tolist(), skip_special_tokens=False)
    return re.sub(r"(<\|(image|video)_pad\|>)+", r"\1", text), keep


@cache
@torch.no_grad()
def logits_by_length() -> list[torch.Tensor]:
    step = prepare([sample()[0]])
    seen = torch.cat([see(model(), step.pictures), see(model(), step.clips)])
    return [predict(model(), rows, seen) for rows in step.rows]


@pytest.mark.parametrize("size", [(100, 100), (2000, 700), (333, 999), (64, 190), (640, 480), (281, 279)])
def test_target_size_is_the_processors(size: tuple[int, int]) -> None:
    width, height = target_size(*size, IMAGE_PIXELS)
    assert processor().image_processor.get_number_of_image_patches(size[1], size[0]) == width * height // 100


def test_pixels_are_the_processors_up_to_rounding() -> None:
    shard, pictures, moving = sample()
    made = processor().image_processor(images=pictures, return_tensors="pt")
    assert made["image_grid_thw"].tolist() == shard.picture_grids.tolist()
    # One step of 8 bits is 1 / 64 of the unit here; the two resizers differ in the last bit.
    assert (made["pixel_values"] - pixels_of(shard.picture_patches.numpy())).abs().max() <= 2.01 / 63.75
    video = processor().video_processor(videos=[np.stack([np.asarray(frame) for frame in moving])], return_tensors="pt")
    assert video["video_grid_thw"].tolist() == shard.clip_grids.tolist()
    assert (video["pixel_values_videos"] - pixels_of(shard.clip_patches.numpy())).abs().max() <= 2.01 / 63.75


@torch.no_grad()
@pytest.mark.parametrize("number", [0, 1])
def test_tokens_positions_and_logits_are_the_models_own(number: int) -> None:
    shard, pictures, moving = sample()
    dialogue = shard.dialogues[number]
    given: dict[str, Any] = {"images": pictures}
    if number == 1:
        given = {"videos": [np.stack([np.asarray(frame) for frame in moving])]}
    own, ours = [], logits_by_length()
    for segment in range(dialogue.segments.max() + 1):
        if segment == 0 and dialogue.segments.max() > 0:
            continue
        text, keep = whole_text(dialogue, segment)
        inputs = processor()(text=[text], return_tensors="pt", **given)
        assert inputs["input_ids"][0].tolist() == dialogue.ids[keep].tolist()
        grids = {name: inputs[name] for name in ("image_grid_thw", "video_grid_thw") if name in inputs}
        types = inputs["mm_token_type_ids"]
        positions, _ = model().model.get_rope_index(inputs["input_ids"], mm_token_type_ids=types, **grids)
        assert np.array_equal(positions[:, 0].numpy(), dialogue.positions[:, keep])
        flat = shard.clip_patches if number == 1 else shard.picture_patches
        inputs["pixel_values_videos" if number == 1 else "pixel_values"] = pixels_of(flat.numpy())
        learned = np.flatnonzero(dialogue.targets[keep] > 0) - 1
        own.append(model()(**inputs).logits[0, learned])
    wanted = torch.cat(own)
    match = [logits for logits in ours if logits.shape == wanted.shape]
    assert match
    assert min((logits - wanted).abs().max() for logits in match) < 1e-3


def test_a_segment_does_not_see_its_neighbour() -> None:
    rng = Random(3)
    writer = Writer(build_tokenizer(read_words()))
    questions = [Exchange("talk", f"hello {word}", "Goodbye!") for word in ("you", "moon")]
    dialogue = write_dialogue(writer, rng, [], questions)
    starts = [dialogue.positions[0, dialogue.segments == segment].min() for segment in (1, 2)]
    assert starts[0] == starts[1] == (dialogue.segments == 0).sum()


def test_the_score_counts_whole_answers() -> None:
    shard = sample()[0]
    result = score(model(), [shard])
    assert sum(result.asked.values()) == sum(
        int((np.diff(np.flatnonzero(dialogue.targets), prepend=-2) != 1).sum()) for dialogue in shard.dialogues
    )
    assert sum(result.right.values()) == sum(result.asked.values())


def test_muon_makes_matrices_orthogonal_and_resumes() -> None:
    torch.manual_seed(0)
    singular = torch.linalg.svdvals(orthogonal(torch.randn(2, 32, 48)).float())
    assert 0.5 < singular.min() < singular.max() < 1.5
    layers = [torch.nn.Linear(8, 8) for _ in range(2)]
    optimisers = [Muon(layer) for layer in layers]
    for _ in range(3):
        (layers[0](torch.ones(1, 8)) ** 2).sum().backward()
        optimisers[0].step(0.01)
    optimisers[1].restore(optimisers[0].state())
    for layer, optimiser in zip(layers, optimisers, strict=True):
        (layer(torch.ones(1, 8)) ** 2).sum().backward()
        optimiser.step(0.01)
    assert torch.equal(layers[0].weight, layers[1].weight)
