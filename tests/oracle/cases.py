"""What the oracle asks: requests over media and text, and the engines that must answer them alike."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from PIL import Image

from beheld.checkpoint.info import read_info
from beheld.core.config import EngineArgs
from tests import long, tiny


@dataclass(frozen=True)
class Clip:
    """A video: `num_frames` frames, seed, and the frames per second that its metadata names (None: no metadata)."""

    num_frames: int
    seed: int = 0
    fps: float | None = None

    @property
    def array(self) -> np.ndarray:
        """uint8 (num_frames, 56, 84, 3)."""
        return tiny.frames(self.num_frames, self.seed)

    @property
    def metadata(self) -> dict[str, Any] | None:
        """What a decoder would say of the file, as transformers names it."""
        if self.fps is None:
            return None
        return {
            "total_num_frames": self.num_frames,
            "fps": self.fps,
            "duration": self.num_frames / self.fps,
            "frames_indices": list(range(self.num_frames)),
        }


@dataclass(frozen=True)
class Ask:
    """One request. `content` holds {i}, {v}, {a} where a picture, a video, a sound stands, in the order of the tuples.

    A picture is (width, height, seed), a sound (seconds, seed). With `as_embeds` the pictures go in as embeddings.
    """

    content: str
    images: tuple[tuple[int, int, int], ...] = ()
    videos: tuple[Clip, ...] = ()
    max_tokens: int = 12
    as_embeds: bool = False
    sounds: tuple[tuple[float, int], ...] = ()

    def __post_init__(self) -> None:
        assert self.content.count("{i}") == len(self.images)
        assert self.content.count("{v}") == len(self.videos)
        assert self.content.count("{a}") == len(self.sounds)

    def prompt(self, family: str) -> str:
        """The whole prompt in the family's form."""
        content = self.content.replace("{i}", tiny.markers(family, num_images=1))
        content = content.replace("{v}", tiny.markers(family, num_videos=1))
        return tiny.wrap(family, content.replace("{a}", tiny.markers(family, num_sounds=1)))

    def pictures(self) -> list[Image.Image]:
        """The pictures, made anew."""
        return [tiny.picture(*image) for image in self.images]

    def waves(self) -> list[np.ndarray]:
        """The sounds, made anew, at tiny.SOUND_RATE."""
        return [tiny.sound(*sound) for sound in self.sounds]


@dataclass(frozen=True)
class Case:
    """Requests that are given to the engine in one call."""

    name: str
    asks: tuple[Ask, ...]


LONG_TEXT = (
    "The first image shows a green triangle, the second a yellow star. There are three shapes on a white ground, "
    "and the large blue square stands right of them all. How many shapes are there?"
)

ONE = Ask("{i}What is in this picture?", ((84, 56, 1),))
OTHER = replace(ONE, images=((84, 56, 2),))
ELSE = replace(ONE, content="{i}What is left of the large blue square?")
FOUR = Ask(
    "{i}{i}{i}{i}What is the content of each image?",
    ((84, 56, 3), (56, 112, 4), (140, 84, 5), (33, 97, 6)),
    max_tokens=16,
)
BETWEEN = Ask("A picture {i} and another {i} are they alike?", ((70, 70, 7), (112, 56, 8)))
LARGE = Ask("{i}Describe it.", ((224, 145, 9),))
TWICE = Ask("{i}{i}Are they the same?", ((84, 56, 10), (84, 56, 10)))
APART = Ask("{i}{i}{i}Which one differs?", ((70, 70, 11), (112, 56, 12), (70, 70, 11)))
SHORT = Ask("Hi!", max_tokens=20)
LONG = Ask(LONG_TEXT, max_tokens=24)
LONG_ELSE = Ask(LONG_TEXT[:-20] + "Where is it?")
FOREIGN = Ask("これは絵です。 What is it?")
VIDEO = Ask("{v}What moves?", videos=(Clip(6),))
ODD_VIDEO = Ask("{v}Describe the video.", videos=(Clip(5, 1),), max_tokens=16)
TIMED_VIDEO = Ask("{v}Where to?", videos=(Clip(8, 2, fps=2.0),))
SLOW_VIDEO = replace(TIMED_VIDEO, videos=(Clip(8, 2, fps=0.5),))
VIDEO_AND_PICTURE = Ask("{v}{i}Is it in the video?", ((84, 56, 13),), (Clip(4, 3),))
VIDEO_AMONG_PICTURES = Ask("First {i} then {v} then {i} which is the odd one?", BETWEEN.images, (Clip(6, 5, fps=2.0),))
HEARD = Ask("{a}What do you hear?", sounds=((0.61, 1),))
HEARD_OTHER = replace(HEARD, sounds=((0.61, 2),))
HEARD_ELSE = replace(HEARD, content="{a}Who speaks, and where?")
SOUNDS = Ask("A sound {a} and another {a} then {a} are they alike?", sounds=((0.5, 3), (0.93, 4), (0.5, 3)))
LONG_SOUND = Ask("{a}Write it down.", sounds=((2.6, 5),), max_tokens=16)
TWO_WINDOWS = Ask("{a}Sum up{a}", sounds=((30.5, 9), (0.5, 10)))
SHORT_SOUND = Ask("What is{a}", sounds=((0.1, 6),))
ALL_KINDS = Ask("{i}{a}And {v} with {a}?", ((84, 56, 14),), (Clip(4, 4),), sounds=((0.4, 7), (0.7, 8)))


def fit(family: str, *asks: Ask) -> tuple[Ask, ...]:
    """The requests as the family can take them: without videos, with frame rates, with a picture or at most one."""
    if family not in tiny.VIDEO_FAMILIES:
        asks = tuple(replace(a, content=a.content.replace("{v}", ""), videos=()) for a in asks)
    if family in tiny.TIMED_FAMILIES:
        asks = tuple(replace(a, videos=tuple(replace(c, fps=c.fps or 2.0) for c in a.videos)) for a in asks)
    if family in tiny.EVEN_SOUND_FAMILIES:
        asks = tuple(replace(a, sounds=tuple((a.sounds[0][0], seed) for _, seed in a.sounds)) for a in asks)
    if family in tiny.PICTURE_FAMILIES:
        asks = tuple(a if a.images else replace(a, content="{i}" + a.content, images=((84, 56, 60),)) for a in asks)
    if family in tiny.LONE_FAMILIES:
        asks = tuple(_alone(a) for a in asks)
    return asks


def _alone(ask: Ask) -> Ask:
    first = ask.images[:1]
    return replace(ask, content="{i}" * len(first) + ask.content.replace("{i}", ""), images=first)


def mixed(family: str) -> tuple[Ask, ...]:
    """Sixteen requests of every sort that the family takes, of different lengths."""
    text = tuple(Ask(f"Question {n}. {LONG_TEXT[: 17 * n]}", max_tokens=5 + 3 * (n % 4)) for n in range(1, 8))
    if family in tiny.SOUND_FAMILIES:
        lengths = enumerate((0.3, 0.51, 0.72, 0.93, 1.14))
        heard = tuple(Ask(f"{{a}}Question {n}?", sounds=((s, 20 + n),), max_tokens=6 + n) for n, s in lengths)
        seen = (ALL_KINDS, BETWEEN, VIDEO) if family in tiny.IMAGE_FAMILIES else (LONG, FOREIGN, HEARD_OTHER)
        return fit(family, HEARD, text[0], *heard, text[1], SOUNDS, LONG_SOUND, *text[2:4], *seen, SHORT)
    if family not in tiny.IMAGE_FAMILIES:
        more = tuple(Ask(f"{LONG_TEXT[31 * n :]} Answer!", max_tokens=4 + n) for n in range(1, 7))
        return (*text, SHORT, *more, LONG, FOREIGN)
    sizes = ((56, 112), (140, 84), (112, 56), (97, 33))
    image = tuple(Ask(f"{{i}}Question {n}?", ((*sizes[n], 20 + n),), max_tokens=6 + 4 * (n % 3)) for n in range(4))
    moving = fit(family, VIDEO, ODD_VIDEO) if family in tiny.VIDEO_FAMILIES else (BETWEEN, LARGE)
    return fit(family, ONE, text[0], *image, text[1], FOUR, *moving, TWICE, *text[2:6], SHORT)


def cases(family: str) -> tuple[Case, ...]:
    """The requests of every engine: each case is one call."""
    found = [Case("text", fit(family, SHORT)), Case("long_text", fit(family, LONG, FOREIGN))]
    if family in tiny.IMAGE_FAMILIES:
        found += [
            Case("one_picture", (ONE,)),
            Case("four_pictures", (FOUR,)),
            Case("pictures_in_text", (BETWEEN,)),
            Case("large_picture", (LARGE,)),
            Case("picture_twice", (TWICE, APART)),
        ]
    if family in tiny.VIDEO_FAMILIES:
        found += [
            Case("video", fit(family, VIDEO)),
            Case("odd_video", fit(family, ODD_VIDEO)),
            Case("timed_video", (TIMED_VIDEO,)),
        ]
        found.append(Case("video_and_picture", fit(family, VIDEO_AND_PICTURE, VIDEO_AMONG_PICTURES)))
    if family in tiny.SOUND_FAMILIES:
        found += [
            Case("sound", fit(family, HEARD)),
            Case("sounds_in_text", fit(family, SOUNDS)),
            Case("long_and_short_sound", fit(family, LONG_SOUND, SHORT_SOUND)),
        ]
        if family in tiny.IMAGE_FAMILIES:
            found.append(Case("all_kinds", fit(family, ALL_KINDS)))
        if family in ("voxtral", "ultravox"):
            found.append(Case("two_windows", (TWO_WINDOWS,)))
        if family in tiny.THINKERS:
            found.append(Case("slow_video", (SLOW_VIDEO,)))
    found.append(Case("sixteen_mixed", mixed(family)))
    return tuple(replace(case, asks=fit(family, *case.asks)) for case in found)


def few_calls(family: str) -> tuple[Case, ...]:
    """The requests of `cases` in two calls: one case alone, as a user's first question is, and the others together."""
    found = {case.name: case for case in cases(family)}
    first = next(found.pop(name) for name in ("one_picture", "sound", "long_text") if name in found)
    rest = dict.fromkeys(ask for case in found.values() for ask in case.asks)
    return first, Case("all_others", tuple(rest))


def asked(family: str, name: str) -> tuple[Case, ...]:
    """The cases of an engine of ENGINES.

    In CI, prompts that are cut are asked in few calls: what a case is alone, the engine with room has shown. Prompts
    that are cut in another way are sixteen of every sort.
    """
    if long.LONG or name == "roomy":
        return cases(family)
    return few_calls(family) if name == "cut" else cases(family)[-1:]


def all_asks(family: str) -> list[Ask]:
    """Every request that any test makes, each once."""
    own = (OTHER, ELSE) if family in tiny.IMAGE_FAMILIES else (LONG_ELSE,)
    if family in tiny.SOUND_FAMILIES:
        own += (HEARD_OTHER, HEARD_ELSE)
    found = [ask for case in cases(family) for ask in case.asks]
    return list(dict.fromkeys([*found, *fit(family, *own, *crowd(family))]))


ROOMY: dict[str, Any] = {
    "max_model_len": 1024,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 2048,
    "block_size": 16,
    "num_gpu_blocks_override": 512,
}
"""Everything fits: each prompt in one step."""

ENGINES: dict[str, dict[str, Any]] = {
    "roomy": ROOMY,
    "cut": ROOMY | {"max_num_seqs": 8, "max_num_batched_tokens": 24, "block_size": 8, "async_scheduling": True},
    "odd": ROOMY | {"max_num_seqs": 5, "max_num_batched_tokens": 13, "enable_prefix_caching": False},
    "overlap": ROOMY | {"max_num_batched_tokens": 96, "async_scheduling": True},
    "in_step": ROOMY | {"max_num_batched_tokens": 96, "async_scheduling": False},
}
"""Name -> options of an engine that runs every case: "cut" and "odd" compute a picture in several steps."""


_OF_FORMS = (
    *("llava", "qwen2_vl", "hunyuan_vl", "qwen2_audio", "minicpmo", "qwen2_5_omni", "llama"),
    *("mistral", "gemma2", "aya_vision", "llama4", "gemma4", "gemma4_dense", "gemma3"),
    *("paligemma", "paligemma2", "molmo2", "phi3_v", "phi4_mm", "mllama", "florence2"),
    *("lfm2_vl", "qwen3_next", "qwen3_5", "deepseek_v2", "deepseek_vl_v2_small", "jamba"),
)
# What the runner computes in another way, though the scheduler knows no difference: states of Mamba-2, sinks, and what
# a tower adds to deeper layers.
_FURTHER = ("falcon_h1", "gpt_oss", "qwen3_vl")


def of_each_form() -> tuple[str, ...]:
    """One family of each `form`, for what the scheduler and the cache do alike in all families of a form.

    Every family's cases are asked with prompts in one step, one of them sixteen at once, and with prompts that are cut.
    What other tests add is the engine's, whatever the family: another way to cut, other orders of the same batch, and
    blocks that are given back. The long form has every family.
    """
    return tuple(family for family in (*_OF_FORMS, *_FURTHER) if family in tiny.TINY)


def forms_differ() -> list[tuple[Any, ...]]:
    """The forms of those of `of_each_form` that stand for a form."""
    return [form(family) for family in _OF_FORMS if family in tiny.TINY]


def form(family: str) -> tuple[Any, ...]:
    """All that the scheduler and the cache know of a family, and the media that `crowd` asks it about."""
    info = read_info(tiny.checkpoint(family), EngineArgs())
    groups = tuple(
        (
            *(g.kind, g.window is None, bool(g.readers), bool(g.num_states)),
            *(None if g.state is None else len(g.state.recurrent), g.values_in_keys),
        )
        for g in info.kv_groups
    )
    rules = (info.position_axes, info.atomic_spans, info.both_ways, info.encoder_reads, info.rope_switch is None)
    media = tuple(modality for modality in ("image", "audio") if modality in info.modalities)
    return groups, rules, info.plain_attention == "", media


def every_time(family: str) -> tuple[str, ...]:
    """Return the engines of CI for a family: prompts in one step and cut, cut in another way for one of each form.

    The others, in the long form, have budgets between theirs.
    """
    return ("roomy", "odd", "cut") if family in (*_OF_FORMS, *_FURTHER) else ("roomy", "cut")


def options(family: str, name: str) -> dict[str, Any]:
    """Those of ENGINES; a step has room for what a family does not cut."""
    found = ENGINES[name]
    if family in tiny.WHOLE_FAMILIES:
        found = found | {"max_num_batched_tokens": max(tiny.WHOLE_FAMILIES[family], found["max_num_batched_tokens"])}
    if family in tiny.ADAPTED_FAMILIES:
        # Each picture takes hundreds of positions.
        found = found | {
            "max_model_len": 4096,
            "num_gpu_blocks_override": 2048,
            "max_num_batched_tokens": 5 * found["max_num_batched_tokens"],
        }
    return found


def tight(family: str) -> dict[str, Any]:
    """Options of an engine with so few blocks that the sequences of `crowd` must be preempted.

    Where every layer has a window, a sequence holds few blocks however long it gets.
    """
    if family in tiny.ADAPTED_FAMILIES:
        return {
            "max_model_len": 704,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 1024,
            "block_size": 8,
            "num_gpu_blocks_override": 220,
        }
    return {
        "max_model_len": 192,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
        "block_size": 8,
        "num_gpu_blocks_override": 14 if family == "mistral" else 28,
    }


def crowd(family: str) -> tuple[Ask, ...]:
    """Eight requests whose answers outgrow the blocks of `tight` when they run together."""
    # Sequences of these hold fewer blocks: of windows, of states instead of prompts.
    long = 36 if family in ("gemma4_dense", "voxtral", "mllama", "florence2") else 20
    if family in tiny.ADAPTED_FAMILIES:
        seen = tuple(Ask(f"{{i}}{n}?", ((56, 56, 40 + n),), max_tokens=36) for n in range(4))
        return (*seen, *(Ask(f"{{a}}{n}?", sounds=((0.4, 40 + n),), max_tokens=36) for n in range(4, 8)))
    if family in tiny.SOUND_FAMILIES:
        return tuple(Ask(f"{{a}}{n}?", sounds=((0.4, 40 + n),), max_tokens=long) for n in range(8))
    if family not in tiny.IMAGE_FAMILIES:
        return tuple(Ask(f"{n} {LONG_TEXT[:24]}", max_tokens=40) for n in range(8))
    return tuple(Ask(f"{{i}}{n}?", ((56, 56, 40 + n),), max_tokens=long) for n in range(8))
