"""Teaches mote to say that it does not know what a picture shows, in the weights that it has.

    python -m training.mote.gather PHOTOS FOLDER...
    python -m training.mote.teach_unknown cache PHOTOS --base FOLDER --out STATES --known 9 --rare 7 --unknown 12
    python -m training.mote.teach_unknown train STATES --base FOLDER --out CHECKPOINT
    python -m training.mote.teach_unknown check CHECKPOINT --photos OTHER_PHOTOS --num 100

`cache` runs all but the last layer over scenes as training made them and over pictures of other things (`unknown.py`),
with dialogues about them, and keeps what enters that layer, 40 pictures a file. `train` goes on training the last layer
alone: on scenes the probabilities of the answers stay as they are (Kullback-Leibler divergence from the model before),
on other pictures the answer to any question is one sentence. Both go on where they were stopped.
`check` counts how often pictures of other things, none of them trained on, get the sentence through `generate`.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoProcessor, Qwen2VLForConditionalGeneration

from beheld.mote import UNKNOWN
from training.mote.checkpoint import build_tokenizer, read_words
from training.mote.dialogue import Dialogue, Media, Writer, write_dialogue
from training.mote.drawn import draw_plainly
from training.mote.evaluate import Case, Input, answer, processed
from training.mote.forward import lay_out_patches, see
from training.mote.last_layer import Item, divergence, entered, entropy, right_answers
from training.mote.patches import clip_patches, picture_patches
from training.mote.questions import Exchange, ask_clip, ask_scenes
from training.mote.render import render
from training.mote.sample import sample_clip, sample_scene
from training.mote.scene import Scene
from training.mote.shard import exchanges_about, make_shard
from training.mote.unknown import DRAWN, photo_files, photograph, texture, unknown
from training.mote.wording import SYSTEMS, roughen

MOTE = Path(__file__).resolve().parents[2] / "beheld" / "mote"
# Neither training nor evaluation reaches these seeds.
FIRST_SEED = 2_000_000_000
PICTURES, CLIPS, GROUPS = 40, 2, 5
KINDS = ("known", "rare", "drawn", "several", "unknown", "texture")
_SCENES = ("known", "rare", "drawn", "several")
ASKED = (
    "What is this?",
    "What is in this picture?",
    "What is shown here?",
    "Who is this?",
    "What animal is this?",
    "Is there a dog?",
    "What colour is the car?",
    "How many people are there?",
    "What is the person doing?",
    "Is it day or night?",
    "What does the sign say?",
    "Summarize this page.",
    "What is the weather like?",
    "Read this document.",
    "What is the total on this receipt?",
    "Which year is it?",
    "Is this a photo?",
    "What is the main object?",
    "What shape is in the middle?",
    "What is on the left?",
    "Explain this chart.",
    "What does the error message say?",
    "Is this safe to eat?",
    "List the objects.",
    "What is happening here?",
    "Hello! What is this?",
)
# Never trained on, to the letter.
ASKED_IN_CHECK = (
    "What is this?",
    "Describe this image.",
    "What do you see here?",
    "What is the woman holding?",
    "How many windows does the house have?",
    "Read all the text in this screenshot.",
    "Which colors dominate?",
    "Is the cat asleep?",
    "Give me three keywords for this photograph.",
    "Does this look like a forest?",
    "What is the highest bar in the chart?",
    "How many shapes are there?",
    "What does the text say?",
    "Is there a circle in the picture?",
)


def ask_unknown(rng: Random, kind: str, count: int) -> list[Exchange]:
    """Questions that have one answer: of those about a scene, several or a clip, or of those about photographs."""
    made: list[Exchange] = []
    while len(made) < count:
        if kind == "clip":
            asked = [ask_clip(rng, sample_clip(rng))]
        elif kind == "group":
            asked = [ask_scenes(rng, [sample_scene(rng, "few") for _ in range(2)])]
        elif rng.random() < 0.4:
            asked = [Exchange("description", rng.choice(ASKED), "")]
        else:
            asked = exchanges_about(rng, sample_scene(rng, rng.choice(("shapes", "text", "both", "few"))))[:2]
        made += [replace(each, topic="description", answer=UNKNOWN) for each in asked]
    return made[:count]


def pan(rng: Random, image: Image.Image) -> list[Image.Image]:
    """A clip that goes over a picture."""
    count, part = rng.randint(4, 10), rng.uniform(0.5, 0.9)
    wide, high = max(32, int(image.width * part)), max(32, int(image.height * part))
    ends = [(rng.randint(0, max(0, image.width - wide)), rng.randint(0, max(0, image.height - high))) for _ in range(2)]
    frames = []
    for index in range(count):
        done = index / (count - 1)
        left, top = (int(first + (last - first) * done) for first, last in zip(*ends, strict=True))
        frames.append(image.crop((left, top, left + wide, top + high)))
    return frames


def tell_rare(seed: int) -> tuple[list[Any], list[Dialogue]]:
    """Patches with grids of 40 scenes that pass for other things most easily, and the dialogues about them.

    A half of them are empty and not of one colour; in the other half one shape lies over another.
    """
    rng, writer = Random(f"rare/{seed}"), Writer(build_tokenizer(read_words()))
    scenes: list[Scene] = []
    while len(scenes) < PICTURES:
        empty = len(scenes) % 2 == 0
        scene = sample_scene(rng, "nothing" if empty else "shapes", 480)
        if scene.background.kind != "plain" if empty else scene.overlap is not None:
            scenes.append(scene)
    stills = [picture_patches(render(scene)) for scene in scenes]
    dialogues = []
    for index, (scene, (_, grid)) in enumerate(zip(scenes, stills, strict=True)):
        asked = [exchange for _ in range(2) for exchange in exchanges_about(rng, scene)]
        dialogues.append(write_dialogue(writer, rng, [Media(index, False, grid)], asked))
    return stills, dialogues


def tell_drawn(seed: int) -> tuple[list[Any], list[Dialogue]]:
    """Patches with grids of 40 drawings that are not the renderer's, and the dialogues about them."""
    rng, writer = Random(f"drawn/{seed}"), Writer(build_tokenizer(read_words()))
    made = [draw_plainly(rng) for _ in range(PICTURES)]
    stills = [picture_patches(image) for _, image in made]
    dialogues = []
    for index, ((scene, _), (_, grid)) in enumerate(zip(made, stills, strict=True)):
        asked = [exchange for _ in range(2) for exchange in exchanges_about(rng, scene)]
        dialogues.append(write_dialogue(writer, rng, [Media(index, False, grid)], asked))
    return stills, dialogues


def tell_several(seed: int) -> tuple[list[Any], list[Dialogue]]:
    """Patches with grids of 40 simple scenes, and 24 dialogues about two to six of them."""
    rng, writer = Random(f"several/{seed}"), Writer(build_tokenizer(read_words()))
    scenes = [sample_scene(rng, "few", 480) for _ in range(PICTURES)]
    stills = [picture_patches(render(scene)) for scene in scenes]
    dialogues = []
    for _ in range(24):
        group = rng.sample(range(PICTURES), rng.choice((2, 2, 3, 4, 5, 6)))
        last = rng.random() < 0.2
        asked = [ask_scenes(rng, [scenes[index] for index in group]) for _ in range(1 if last else 4)]
        media = [Media(index, False, stills[index][1]) for index in group]
        dialogues.append(write_dialogue(writer, rng, media, asked, media_last=last))
    return stills, dialogues


def tell_unknown(
    seed: int, photos: list[list[Path]], textures: bool = False
) -> tuple[list[Any], list[Any], list[Dialogue]]:
    """Patches with grids of 40 pictures and of 2 clips of other things, and the dialogues about them."""
    rng, writer = Random(f"{'texture' if textures else 'unknown'}/{seed}"), Writer(build_tokenizer(read_words()))
    images = [texture(rng) if textures else unknown(rng, photos) for _ in range(PICTURES)]
    stills = [picture_patches(image) for image in images]
    clips = [clip_patches(pan(rng, rng.choice(images))) for _ in range(CLIPS)]
    media = [Media(index, False, grid) for index, (_, grid) in enumerate(stills)]
    dialogues = []
    for item in media:
        dialogues.append(write_dialogue(writer, rng, [item], ask_unknown(rng, "one", 5)))
        if rng.random() < 0.25:
            dialogues.append(write_dialogue(writer, rng, [item], ask_unknown(rng, "one", 1), media_last=True))
    for _ in range(GROUPS):
        several = rng.sample(media, rng.choice((2, 2, 3, 4)))
        dialogues.append(write_dialogue(writer, rng, several, ask_unknown(rng, "group", 3)))
    for index, (_, grid) in enumerate(clips):
        dialogues.append(write_dialogue(writer, rng, [Media(index, True, grid)], ask_unknown(rng, "clip", 3)))
    return stills, clips, dialogues


TELL = {"rare": tell_rare, "drawn": tell_drawn, "several": tell_several}


def _split(flat: np.ndarray, grids: np.ndarray) -> list[tuple[np.ndarray, Any]]:
    ends = np.cumsum(grids.prod(1))
    return [(flat[end - int(grid.prod()) : end], grid) for end, grid in zip(ends, grids, strict=True)]


@torch.inference_mode()
def seen_by(model: Any, stills: Sequence[Any], clips: Sequence[Any]) -> list[Tensor]:
    """The embeddings of each picture and then of each clip, a few at a time."""
    made: list[Tensor] = []
    for items in (stills, clips):
        for start in range(0, len(items), 8):
            group = items[start : start + 8]
            grids = np.array([grid for _, grid in group])
            patches = lay_out_patches(torch.from_numpy(np.concatenate([flat for flat, _ in group])), grids)
            made += see(model, patches).half().split((grids.prod(1) // 4).tolist())
    return made


def cache(options: argparse.Namespace) -> None:
    """Write the files that are not there yet."""
    torch.set_num_threads(1)
    load: Any = Qwen2VLForConditionalGeneration.from_pretrained
    tower, model = (load(options.base, dtype=dtype).eval() for dtype in (torch.bfloat16, torch.float32))
    tokenizer, photos, begun = build_tokenizer(read_words()), photo_files(options.photos), time.monotonic()
    options.out.mkdir(parents=True, exist_ok=True)
    names = [(kind, number) for kind in KINDS for number in range(getattr(options, kind))]
    for kind, number in sorted(names, key=lambda pair: pair[1]):
        path = options.out / f"{kind}-{number:03}.pt"
        if path.exists() or number % options.parts != options.part:
            continue
        if time.monotonic() - begun > options.seconds:
            return
        if kind == "known":
            shard = make_shard(tokenizer, FIRST_SEED + number)
            stills = _split(shard.picture_patches, shard.picture_grids)
            clips, dialogues = _split(shard.clip_patches, shard.clip_grids), list(shard.dialogues)
        elif kind in TELL:
            clips = []
            stills, dialogues = TELL[kind](number)
        else:
            stills, clips, dialogues = tell_unknown(number, photos, kind == "texture")
        seen = seen_by(tower, stills, clips)
        torch.save(entered(model, dialogues, seen, len(stills)), path.with_suffix(".part"))
        path.with_suffix(".part").rename(path)
        print(f"{path.name} after {time.monotonic() - begun:.0f} s", flush=True)


def train(options: argparse.Namespace) -> None:
    """Train the last layer for some seconds; then write the checkpoint as it is."""
    torch.set_num_threads(1)
    load: Any = Qwen2VLForConditionalGeneration.from_pretrained
    model = load(options.base, dtype=torch.float32).eval().requires_grad_(False)
    inner = model.model.language_model
    inner.layers[-1].requires_grad_(True)
    inner.norm.requires_grad_(True)
    learned = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    best = torch.optim.AdamW(learned.values(), lr=options.rate, betas=(0.9, 0.98), weight_decay=0.0)
    step, begun = 0, time.monotonic()
    state = options.out.with_suffix(".state")
    if state.exists():
        saved = torch.load(state)
        step = saved["step"]
        best.load_state_dict(saved["optimiser"])
        with torch.no_grad():
            for name, weight in saved["weights"].items():
                learned[name].copy_(weight)
    paths = {kind: sorted(options.states.glob(f"{kind}-*.pt")) for kind in KINDS}
    # The first files of each kind are held out.
    held = {kind: load_items(found[: options.held]) for kind, found in paths.items()}
    used = {kind: found[options.held :] for kind, found in paths.items()}
    known = load_items([path for kind in _SCENES for path in used[kind]])
    others = load_items([path for kind in ("unknown", "texture") for path in used[kind]])
    print(f"{len(known)} dialogues about scenes, {len(others)} about others", flush=True)
    while step < options.steps and time.monotonic() - begun < options.seconds:
        rng = Random(step)
        for group in best.param_groups:
            group["lr"] = options.rate * min(1.0, (step + 1) / 30) * (1.0 - (step / options.steps) ** 2)
        kept = divergence(model, _near(rng, known, options.batch))
        taught = entropy(model, _near(rng, others, options.batch))
        best.zero_grad()
        (options.keep * kept + taught).backward()
        torch.nn.utils.clip_grad_norm_(learned.values(), 1.0)
        best.step()
        step += 1
        if step % 20 == 0:
            spent = time.monotonic() - begun
            print(f"{step}: {kept.item():.5f} {taught.item():.5f}; {spent:.0f} s", flush=True)
    torch.save({"step": step, "optimiser": best.state_dict(), "weights": learned}, state)
    for kind, items in held.items():
        print(f"{step}: held {kind}: {right_answers(model, items)} (now, before, of)", flush=True)
    write(options.out, learned, options.base)


def load_items(paths: Sequence[Path]) -> list[Item]:
    """The items of files of the cache, the shortest first, those of one length in any order."""
    items = [item for path in paths for item in torch.load(path, weights_only=False)]
    Random(1).shuffle(items)
    return sorted(items, key=lambda item: len(item.segments))


def _near(rng: Random, items: Sequence[Item], count: int) -> Sequence[Item]:
    """Some items of nearly one length, so that little of a batch is padding."""
    start = rng.randrange(max(1, len(items) - count + 1))
    return items[start : start + count]


def write(folder: Path, learned: dict[str, Tensor], base: Path) -> None:
    """Write the checkpoint `base` with the learned weights in place."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in base.iterdir():
        if path.suffix in (".json", ".jinja"):
            (folder / path.name).write_bytes(path.read_bytes())
    weights = load_file(base / "model.safetensors")
    for name, weight in learned.items():
        # The file's names are those of the class before the text model had a name of its own, or today's.
        stored = name if name in weights else name.replace("model.language_model.", "model.")
        weights[stored] = weight.detach().to(weights[stored].dtype).contiguous()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def check(options: argparse.Namespace) -> None:
    """Count the sentence on other pictures: photographs of a folder, and each drawn kind, with other seeds."""
    torch.set_num_threads(1)
    processor = AutoProcessor.from_pretrained(options.checkpoint)
    model: Any = Qwen2VLForConditionalGeneration.from_pretrained(options.checkpoint, dtype=torch.bfloat16).eval()
    kinds: dict[str, list[Image.Image]] = {}
    groups = photo_files(options.photos) if options.photos else []
    for group in groups:
        made = kinds.setdefault(group[0].parent.name, [])
        for number, path in enumerate(group):
            with Image.open(path) as opened:
                made.append(opened.convert("RGB"))
            parts = range(options.first, options.first + options.parts)
            made += [photograph(Random(f"check/{number}/{part}"), [[path]]) for part in parts]
    for draw in DRAWN:
        name = draw.__name__
        numbers = range(options.first, options.first + options.num)
        kinds[name] = [draw(Random(f"check/{name}/{number}")) for number in numbers]
    total = said = 0
    for kind, pictures in kinds.items():
        inputs: list[Input] = []
        for number, picture in enumerate(pictures):
            rng = Random(f"ask/{kind}/{number}")
            question = ASKED_IN_CHECK[number % len(ASKED_IN_CHECK)]
            system = rng.choice(SYSTEMS) if rng.random() < 0.3 else None
            exchange = Exchange("unknown", question, UNKNOWN)
            case = Case(exchange, [picture], [], roughen(rng, question), system, rng.random() < 0.2)
            inputs.append(processed(processor, "unknown", case))
        right = 0
        for start in range(0, len(inputs), 8):
            some = inputs[start : start + 8]
            for offset, (item, ids) in enumerate(zip(some, answer(model, some), strict=True)):
                text = processor.tokenizer.decode(ids, skip_special_tokens=True)
                right += text == UNKNOWN
                if text != UNKNOWN:
                    print(f"{kind} {start + offset}: {item.question!r} -> {text!r}", flush=True)
        total, said = total + len(pictures), said + right
        print(f"| {kind} | {right} | {len(pictures)} | {right / max(1, len(pictures)):.1%} |", flush=True)
    print(f"{said} of {total}: {said / max(1, total):.1%}")


def main() -> None:
    """Run one of the three."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    acts = parser.add_subparsers(required=True)
    caching = acts.add_parser("cache")
    caching.add_argument("photos", type=Path)
    caching.add_argument("--out", type=Path, required=True)
    caching.add_argument("--known", type=int, default=16, help="files of 40 scenes and 5 clips")
    caching.add_argument("--rare", type=int, default=10, help="files of 40 scenes that pass for other things")
    caching.add_argument("--drawn", type=int, default=9, help="files of 40 drawings that are not the renderer's")
    caching.add_argument("--several", type=int, default=4, help="files of 24 dialogues about several of 40 scenes")
    caching.add_argument("--unknown", type=int, default=36, help="files of 40 pictures and 2 clips")
    caching.add_argument("--texture", type=int, default=6, help="files of 40 textures and 2 clips")
    caching.add_argument("--part", type=int, default=0, help="of several processes, which one this is")
    caching.add_argument("--parts", type=int, default=1)
    caching.add_argument("--seconds", type=float, default=1e9, help="how long this call may take")
    caching.set_defaults(act=cache)
    training = acts.add_parser("train")
    training.add_argument("states", type=Path)
    training.add_argument("--out", type=Path, required=True)
    training.add_argument("--steps", type=int, default=400)
    training.add_argument("--batch", type=int, default=8, help="dialogues of each kind in a step")
    training.add_argument("--rate", type=float, default=4e-4)
    training.add_argument("--keep", type=float, default=4.0, help="weight of leaving scenes as they are")
    training.add_argument("--held", type=int, default=1, help="held-out files of each kind")
    training.add_argument("--seconds", type=float, default=1e9, help="how long this call may train")
    training.set_defaults(act=train)
    for parser_of_act in (caching, training):
        parser_of_act.add_argument("--base", type=Path, default=MOTE, help="the checkpoint that is taught")
    checking = acts.add_parser("check")
    checking.add_argument("checkpoint", type=Path)
    checking.add_argument("--photos", type=Path, help="a folder of folders of photographs")
    checking.add_argument("--parts", type=int, default=2, help="parts of each photograph, further to the whole")
    checking.add_argument("--first", type=int, default=0, help="seed of the first drawn picture of each kind")
    checking.add_argument("--num", type=int, default=100, help="pictures of each drawn kind")
    checking.set_defaults(act=check)
    options = parser.parse_args()
    options.act(options)


if __name__ == "__main__":
    main()
