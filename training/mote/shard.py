"""Makes shards of training data: pictures and clips with the dialogues about them, all derived from one seed."""

from dataclasses import dataclass
from random import Random

import numpy as np
from tokenizers import Tokenizer

from training.mote.dialogue import Dialogue, Media, Writer, write_dialogue
from training.mote.patches import clip_patches, picture_patches
from training.mote.questions import Exchange, ask_attribute, ask_clip, ask_description, ask_scenes, ask_text
from training.mote.render import render
from training.mote.sample import render_clip, sample_clip, sample_scene
from training.mote.scene import Scene
from training.mote.smalltalk import small_talk

KINDS = {"shapes": 13, "text": 12, "both": 5, "few": 9, "nothing": 1}
CLIPS = 5
GROUPS = 6
EVALUATION_SEED = 1_000_000_000


@dataclass(frozen=True)
class Shard:
    """8-bit patches of all pictures (N, 300) and clips (M, 600), their grids, and the dialogues about them."""

    picture_patches: np.ndarray
    picture_grids: np.ndarray
    clip_patches: np.ndarray
    clip_grids: np.ndarray
    dialogues: tuple[Dialogue, ...]


def exchanges_about(rng: Random, scene: Scene) -> list[Exchange]:
    """Questions about one scene, so many of each topic as it has something to learn from."""
    asked = [ask_description(rng, scene)]
    if scene.label is not None or rng.random() < 0.1:
        asked.append(ask_text(rng, scene))
    attributes = 3 if len(scene.told) > 1 else 2 if scene.told else 1 if rng.random() < 0.4 else 0
    asked += [ask_attribute(rng, scene) for _ in range(attributes)]
    rng.shuffle(asked)
    return asked


def make_shard(tokenizer: Tokenizer, seed: int, largest: int = 480) -> Shard:
    """The shard of a seed: 40 pictures, 5 clips and some 80 dialogues, in about a third of a second."""
    rng = Random(seed)
    writer = Writer(tokenizer)
    scenes = [
        sample_scene(rng, kind, largest if rng.random() < 0.97 else 3 * largest)
        for kind, count in KINDS.items()
        for _ in range(count)
    ]
    patches, grids = zip(*(picture_patches(render(scene)) for scene in scenes), strict=True)
    media = [Media(index, False, grid) for index, grid in enumerate(grids)]
    dialogues = []
    for scene, item in zip(scenes, media, strict=True):
        asked = exchanges_about(rng, scene)
        dialogues.append(write_dialogue(writer, rng, [item], asked))
        if rng.random() < 0.25:
            dialogues.append(write_dialogue(writer, rng, [item], [rng.choice(asked)], media_last=True))
    start = sum(count for kind, count in KINDS.items() if kind in ("shapes", "text", "both"))
    few = range(start, start + KINDS["few"])
    for _ in range(GROUPS):
        group = rng.sample(few, rng.choice((2, 2, 3, 4, 5, 6)))
        last = rng.random() < 0.2
        about = [scenes[index] for index in group]
        asked = [ask_scenes(rng, about) for _ in range(1 if last else 4)]
        dialogues.append(write_dialogue(writer, rng, [media[index] for index in group], asked, media_last=last))
    clips = [sample_clip(rng) for _ in range(CLIPS)]
    moving, clip_grids = zip(*(clip_patches(render_clip(clip)) for clip in clips), strict=True)
    for index, (clip, grid) in enumerate(zip(clips, clip_grids, strict=True)):
        last = rng.random() < 0.2
        asked = [ask_clip(rng, clip) for _ in range(1 if last else 4)]
        dialogues.append(write_dialogue(writer, rng, [Media(index, True, grid)], asked, media_last=last))
    talk = [Exchange("talk", *small_talk(rng)) for _ in range(3)]
    dialogues.append(write_dialogue(writer, rng, [], talk))
    return Shard(
        np.concatenate(patches),
        np.array(grids, np.int64),
        np.concatenate(moving),
        np.array(clip_grids, np.int64),
        tuple(dialogues),
    )


def common_words(seed: int = 77, rounds: int = 4000) -> list[str]:
    """Words of questions and answers that follow a blank, most frequent first: what the tokenizer is built from."""
    rng = Random(seed)
    counts: dict[str, int] = {}
    for _ in range(rounds):
        scene = sample_scene(rng, rng.choice(("shapes", "few", "nothing")))
        several = [sample_scene(rng, "few") for _ in range(3)]
        asked = [ask_description(rng, scene), ask_scenes(rng, several), ask_clip(rng, sample_clip(rng))]
        asked += [ask_attribute(rng, scene), ask_text(rng, scene), Exchange("talk", *small_talk(rng))]
        for exchange in asked:
            for text in (exchange.question, exchange.answer):
                for word in text.split('"')[0].replace("\n", "|").split(" ")[1:]:
                    clean = word.split("|")[0].rstrip("?.,!:)")
                    if clean.isalpha() and clean.isascii():
                        counts[clean] = counts.get(clean, 0) + 1
    return sorted((word for word in counts if len(word) > 1), key=lambda word: (-counts[word], word))
