"""Measures mote on scenes never trained on: python -m training.mote.evaluate --num 1000 --device cuda.

This is the whole path of a user: transformers' own processor, template, model class and greedy generate, on pictures
of up to 2000 pixels. An answer counts where it equals the truth to the letter.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoProcessor, Qwen2VLForConditionalGeneration

from training.mote.questions import Exchange, ask_attribute, ask_clip, ask_description, ask_scenes, ask_text
from training.mote.render import render
from training.mote.sample import render_clip, sample_clip, sample_scene
from training.mote.shard import EVALUATION_SEED
from training.mote.smalltalk import small_talk
from training.mote.wording import SYSTEMS, roughen

LARGEST = 2000
GOALS = {"attributes": 0.97, "description": 0.93, "text": 0.9, "several": 0.92, "motion": 0.95, "talk": 0.95}
NAMES = {
    "attributes": "colour, shape, count, place, size, relation",
    "description": "whole description",
    "text": "printed text",
    "several": "several pictures",
    "motion": "motion in videos",
    "talk": "no picture",
}


@dataclass(frozen=True)
class Case:
    """One question with its media and the true answer."""

    exchange: Exchange
    pictures: list[Image.Image]
    clip: list[Image.Image]
    question: str
    system: str | None
    media_last: bool


@dataclass(frozen=True)
class Input:
    """A case as the processor gives it."""

    topic: str
    question: str
    answer: str
    ids: Tensor
    types: Tensor
    pixels: Tensor | None
    grids: Tensor | None
    is_clip: bool


def sample_case(topic: str, number: int, largest: int = LARGEST) -> Case:
    """Case `number` of a topic, of pictures with sides up to `largest`; seeds lie where training never goes."""
    rng = Random(f"{EVALUATION_SEED}/{topic}/{number}")
    pictures: list[Image.Image] = []
    clip: list[Image.Image] = []
    if topic == "attributes":
        scene = sample_scene(rng, rng.choices(("shapes", "both", "few"), (7, 2, 1))[0], largest)
        exchange = ask_attribute(rng, scene)
        pictures = [render(scene)]
    elif topic == "description":
        kind = rng.choices(("shapes", "both", "few", "text", "nothing"), (60, 15, 10, 12, 3))[0]
        scene = sample_scene(rng, kind, largest)
        exchange = ask_description(rng, scene)
        pictures = [render(scene)]
    elif topic == "text":
        scene = sample_scene(rng, rng.choice(("text", "text", "both")), largest)
        exchange = ask_text(rng, scene)
        pictures = [render(scene)]
    elif topic == "several":
        scenes = [sample_scene(rng, "few", largest // 2) for _ in range(rng.choice((2, 2, 3, 4, 5, 6)))]
        exchange = ask_scenes(rng, scenes)
        pictures = [render(scene) for scene in scenes]
    elif topic == "motion":
        motion = sample_clip(rng)
        exchange = ask_clip(rng, motion)
        clip = render_clip(motion)
    else:
        exchange = Exchange("talk", *small_talk(rng))
    system = rng.choice(SYSTEMS) if rng.random() < 0.3 else None
    return Case(exchange, pictures, clip, roughen(rng, exchange.question), system, rng.random() < 0.2)


_processors: dict[str, Any] = {}


def prepare_case(job: tuple[str, str, int]) -> Input:
    """Sample, render and process the case (checkpoint, topic, number)."""
    checkpoint, topic, number = job
    if checkpoint not in _processors:
        torch.set_num_threads(1)
        _processors[checkpoint] = AutoProcessor.from_pretrained(checkpoint)
    return processed(_processors[checkpoint], topic, sample_case(topic, number))


def processed(processor: Any, topic: str, case: Case) -> Input:
    """The case as the processor gives it."""
    media = [{"type": "image"} for _ in case.pictures] + [{"type": "video"} for _ in case.clip[:1]]
    words = [{"type": "text", "text": case.question}]
    content = [*words, *media] if case.media_last else [*media, *words]
    messages = [{"role": "user", "content": content}]
    if case.system is not None:
        messages.insert(0, {"role": "system", "content": case.system})
    text = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    given: dict[str, Any] = {}
    if case.pictures:
        given["images"] = case.pictures
    if case.clip:
        given["videos"] = [np.stack([np.asarray(frame) for frame in case.clip])]
    made = processor(text=[text], return_tensors="pt", return_mm_token_type_ids=True, **given)
    return Input(
        topic,
        case.question,
        case.exchange.answer,
        made["input_ids"][0],
        made["mm_token_type_ids"][0],
        made.get("pixel_values", made.get("pixel_values_videos")),
        made.get("image_grid_thw", made.get("video_grid_thw")),
        bool(case.clip),
    )


@torch.inference_mode()
def answer(model: Any, inputs: list[Input]) -> list[list[int]]:
    """Token ids of the greedy answers to inputs of one topic, in one batch, padded on the left."""
    longest = max(len(item.ids) for item in inputs)
    ids = torch.zeros(len(inputs), longest, dtype=torch.long)
    types, mask = torch.zeros_like(ids), torch.zeros_like(ids)
    for row, item in enumerate(inputs):
        ids[row, longest - len(item.ids) :] = item.ids
        types[row, longest - len(item.ids) :] = item.types
        mask[row, longest - len(item.ids) :] = 1
    given = {"input_ids": ids, "attention_mask": mask, "mm_token_type_ids": types}
    pixels = [item.pixels for item in inputs if item.pixels is not None]
    grids = [item.grids for item in inputs if item.grids is not None]
    if pixels:
        clips = inputs[0].is_clip
        given["pixel_values_videos" if clips else "pixel_values"] = torch.cat(pixels)
        given["video_grid_thw" if clips else "image_grid_thw"] = torch.cat(grids)
    given = {name: value.to(model.device) for name, value in given.items()}
    made = model.generate(**given, max_new_tokens=300, do_sample=False)
    answers: list[list[int]] = made[:, longest:].cpu().tolist()
    return answers


def batches(inputs: Iterator[Input], size: int) -> Iterator[list[Input]]:
    """Inputs in lists of at most `size`."""
    group: list[Input] = []
    for item in inputs:
        group.append(item)
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group


def main() -> None:
    """Measure every topic and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", default=str(Path(__file__).resolve().parents[2] / "beheld" / "mote"))
    parser.add_argument("--num", type=int, default=100, help="questions of each topic")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--errors", type=int, default=3, help="wrong answers to show of each topic")
    options = parser.parse_args()
    jobs = {topic: [(options.checkpoint, topic, number) for number in range(options.num)] for topic in GOALS}
    lines = ["| what is asked | right | of | share | goal |", "|---|---:|---:|---:|---:|"]
    with get_context("spawn").Pool(options.workers) as pool:
        model: Any = Qwen2VLForConditionalGeneration.from_pretrained(options.checkpoint, dtype=torch.bfloat16)
        model = model.to(options.device).eval()
        tokenizer = AutoProcessor.from_pretrained(options.checkpoint).tokenizer
        for topic, cases in jobs.items():
            right, shown = 0, 0
            for group in batches(pool.imap(prepare_case, cases, chunksize=4), options.batch):
                for item, ids in zip(group, answer(model, group), strict=True):
                    said = tokenizer.decode(ids, skip_special_tokens=True)
                    right += said == item.answer
                    if said != item.answer and shown < options.errors:
                        shown += 1
                        print(f"{topic}: {item.question!r}\n  said  {said!r}\n  truth {item.answer!r}", flush=True)
            share = right / options.num
            lines.append(f"| {NAMES[topic]} | {right} | {options.num} | {share:.1%} | {GOALS[topic]:.0%} |")
            print(lines[-1], flush=True)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
