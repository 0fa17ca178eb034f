"""The census of types that read media: a tiny checkpoint of each, its processor included, made of a recipe.

A recipe says what a type's configuration and processor need beyond small sizes. Prompts with no, one and two images or
sounds are compared with transformers' generate(), the prompts' ids included. Recipes of types that only hear stand in
census_sound.py.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from packaging.version import Version

from tests import tiny
from tests import tiny_text as text

_ANSWER_TOKENS = 8
_TOLERANCE = 1e-3
_TOWER: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "embed_dim"), 32),
    **dict.fromkeys(("intermediate_size", "mlp_dim"), 48),
    **dict.fromkeys(("num_hidden_layers", "depth", "num_layers", "layers"), 2),
    **dict.fromkeys(("num_attention_heads", "num_heads", "num_key_value_heads"), 2),
    "image_size": 56,
    "num_channels": 3,
    "patch_size": 14,
}


@dataclass(frozen=True)
class Recipe:
    """How a tiny checkpoint of a type is made.

    Attributes:
        tokens: special tokens of its tokenizer beyond those of turns.
        config: token -> id -> keyword arguments of the configuration class; sub-configurations are dictionaries, to
            which small sizes are added.
        processor: makes transformers' processor of a tokenizer.
        image: an image's text in a prompt; empty if it takes none.
        named: attributes of the tokenizer that name tokens.
        video: a video's text; empty if it takes none.
        most: images, or sounds, in one prompt.
        audio: a sound's text; empty if it takes none.
        rate: samples of a sound per second.
        room: positions of a prompt and its answer.
        reader: makes the processor that reads a text with images of the checkpoint's, if that takes none as they are.
        sizes: options of the image processor that its files do not keep.
        wrapped_by: the class whose checkpoint it is, around the model that generates.
        alike: whether the images of a prompt are of one size here, because transformers pads smaller ones, and so lets
            its answers about an image depend on the others.
        options: what transformers' processor must be told to make inputs that its model takes.
        alone: whether the processor also reads a text alone; if not, the tokenizer does.
        generating: keyword arguments of transformers' generate().
        start: for a decoder behind an encoder that hears or sees, the token that its prompts start with.
        always: whether every prompt has an image.
        begins: for a decoder whose encoder reads the prompt, the token that starts its answers.
        placed: whether the processor places an image itself, so that prompts do not have its text.
        speaker: returns the part of transformers' model that generates from a text alone.
        unlisted: places of an image, before the prompt, that have no ids in transformers.
        frames: of the video.
        asked: makes transformers' inputs of a prompt, and the prompt's ids as they are in the end, from the processor,
            the prompt and its media; None for the usual way.
        settle: changes what random weights leave as it is made.
        load: makes the processor of a folder, if transformers' needs a library that is not wanted here.
    """

    tokens: tuple[str, ...]
    config: Callable[[Mapping[str, int]], dict[str, Any]]
    processor: Callable[[Any], Any]
    image: str = ""
    named: Mapping[str, str] = field(default_factory=dict)
    video: str = ""
    most: int = 2
    room: int = 1024
    reader: Callable[[Any], Any] | None = None
    alone: bool = True
    sizes: Mapping[str, Any] = field(default_factory=dict)
    wrapped_by: str = ""
    alike: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    audio: str = ""
    rate: int = 16000
    generating: Mapping[str, Any] = field(default_factory=dict)
    start: str = ""
    begins: str = ""
    always: bool = False
    placed: bool = False
    speaker: Callable[[Any], Any] = lambda model: model
    unlisted: int = 0
    frames: int = 8
    asked: Callable[[Any, str, Any], tuple[dict[str, Any], Callable[[], list[int]]]] | None = None
    settle: Callable[[Any], None] = lambda model: None
    load: Callable[[Path], Any] | None = None


class Sounds(list[Any]):
    """The sounds of a prompt, each an array of samples."""


def small(known: Any, own: Mapping[str, Any], sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Return keyword arguments of a configuration class: small sizes, and what `own` says."""
    from tests.census import IDS

    attributes = getattr(known, "attribute_map", {})
    names = {each.name for each in dataclasses.fields(known)} | set(attributes)
    made = {name: value for name, value in sizes.items() if name in names and name not in own}
    if sizes is not _TOWER:
        made |= {name: value for name, value in IDS.items() if name in names and name not in own}
    made = {name: value for name, value in made.items() if attributes.get(name) not in made and
            attributes.get(name) not in own}  # fmt: skip
    return made | dict(own)


def tiny_config(kind: str, own: Mapping[str, Any]) -> Any:
    """Return a small configuration of this type."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from tests.census import SIZES

    known = CONFIG_MAPPING[kind]
    made = dict(own)
    for name, part in known.sub_configs.items():
        given = dict(own.get(name) or {})
        part = CONFIG_MAPPING[given["model_type"]] if "model_type" in given else part
        if isinstance(part, str) or not dataclasses.is_dataclass(part):
            continue
        made[name] = small(part, given, _TOWER if name.startswith("vision") else SIZES)
    return known(**tiny._reshape.get()(made))


def make(kind: str, recipe: Recipe, folder: Path) -> tuple[Any, Any]:
    """Write a tiny checkpoint of this type into the empty folder; returns transformers' model and processor of it."""
    from transformers import AutoProcessor, AutoTokenizer

    from tests.census import media_classes

    specials = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *recipe.tokens)
    settings = {"extra_special_tokens": dict(recipe.named)} | dict(recipe.named) if recipe.named else {}
    ids = text.write_qwen_tokenizer(folder, specials, "<|im_end|>", settings)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    processor = recipe.processor(tokenizer)
    if getattr(processor, "tokenizer", tokenizer) is not tokenizer:
        # It has one of its own kind.
        for file in folder.iterdir():
            file.unlink()
    processor.save_pretrained(folder)
    config = tiny_config(kind, recipe.config(ids))
    kind_of_model = getattr(transformers, recipe.wrapped_by or media_classes()[kind])
    torch.manual_seed(0)
    model = kind_of_model._from_config(config, dtype=torch.float32).eval()
    tiny._fill(model.model if recipe.wrapped_by else model)
    recipe.settle(model)
    model.config.architectures = [type(model).__name__]
    model.save_pretrained(folder)
    loaded = kind_of_model.from_pretrained(folder, dtype=torch.float32).eval()
    processor = AutoProcessor.from_pretrained(folder) if recipe.load is None else recipe.load(folder)
    return loaded.model if recipe.wrapped_by else loaded, processor


QUESTIONS = ((), ((84, 56, 1),), ((56, 112, 2),), ((84, 56, 3), (112, 70, 4)))
# Seconds and seed of each sound; the first is longer than the windows of small towers, the last as long as one.
HEARD = (((2.7, 1),), ((0.9, 2),), ((1.3, 3), (2.0, 4)))


CLIP, OTHER_CLIP = "a video", "another video"
_CLIPS = {CLIP: 5, OTHER_CLIP: 6}


def _clip_seed(name: str) -> int:
    """Return the seed of a video: that of its name, or the number that it has in place of one."""
    return _CLIPS.get(name) or int(name)


def times(count: int) -> dict[str, Any]:
    """Return when the frames of a video are."""
    return {"total_num_frames": count, "fps": 2.0, "duration": count / 2, "frames_indices": list(range(count))}


def trial(recipe: Recipe) -> Any:
    """Return media of a prompt that shows whether transformers itself can run a type."""
    if recipe.video and not recipe.image:
        return CLIP
    return [tiny.picture(84, 56, 1)] if recipe.image else Sounds([_sound(recipe, 0.9, 2)])


def _sound(recipe: Recipe, seconds: float, seed: int) -> Any:
    return tiny.sound(seconds * recipe.rate / tiny.SOUND_RATE, seed)


def questions(recipe: Recipe) -> list[Any]:
    """Return the media of all prompts that are compared: lists of images, Sounds and CLIP."""
    asked: list[Any] = [] if recipe.start or recipe.always else [[]]
    if recipe.image:
        fitting = [images for images in QUESTIONS if 0 < len(images) <= recipe.most]
        if recipe.alike:
            fitting = [tuple((*images[0][:2], each[2]) for each in images) for images in fitting]
        asked += [[tiny.picture(*each) for each in images] for images in fitting]
    if recipe.audio:
        asked += [Sounds(_sound(recipe, *each) for each in waves) for waves in HEARD if len(waves) <= recipe.most]
    return [*asked, *([CLIP] if recipe.video else [])]


def given(recipe: Recipe, media: Any) -> dict[str, Any]:
    """Return the media of a prompt as the engine takes them."""
    if isinstance(media, Sounds):
        return {"audio": [(wave, recipe.rate) for wave in media]}
    if isinstance(media, str):
        return {"video": (tiny.frames(recipe.frames, _clip_seed(media)), times(recipe.frames))}
    return {"image": media} if media else {}


def prompt(recipe: Recipe, media: Any) -> str:
    """Return a prompt of these media."""
    if recipe.start:
        # The words that a decoder continues, in one prompt of two.
        size, usual = (len(media[0]), recipe.rate) if isinstance(media, Sounds) else (media[0].width, 60)
        return recipe.start + ("What is it" if size > usual else "")
    image = "" if recipe.placed else recipe.image
    marks = (recipe.audio if isinstance(media, Sounds) else image) * len(media)
    if isinstance(media, str):
        marks = "" if recipe.placed else recipe.video
    return f"<|im_start|>user\n{marks}What is it, and where does it stand?<|im_end|>\n<|im_start|>assistant\n"


def prepared(processor: Any, recipe: Recipe, asked: Any) -> tuple[dict[str, Any], Callable[[], list[int]] | None]:
    """Return transformers' inputs of a prompt with these media, and what finds its ids where they do not have them."""
    words = prompt(recipe, asked)
    media: dict[str, Any] = {"images": [asked]} if asked else {}
    if isinstance(asked, str):
        clip, when = tiny.frames(recipe.frames, _clip_seed(asked)), times(recipe.frames)
        media = {"videos": [clip], "video_metadata": [when], "do_sample_frames": False}
    if isinstance(asked, Sounds):
        media = {"audio": list(asked)}
    found: Callable[[], list[int]] | None = None
    if recipe.asked is not None:
        inputs, found = recipe.asked(processor, words, asked)
    elif recipe.start:
        if isinstance(asked, Sounds):
            inputs = dict(processor.feature_extractor(list(asked), return_tensors="pt", sampling_rate=recipe.rate))
        else:
            inputs = dict(processor.image_processor(asked, return_tensors="pt", **recipe.sizes))
        inputs["decoder_input_ids"] = torch.tensor([processor.tokenizer(words, add_special_tokens=False)["input_ids"]])
    else:
        reads = processor if recipe.reader is None else recipe.reader(processor)
        reads = reads if media or recipe.alone else processor.tokenizer
        told = recipe.options | recipe.sizes if media else {}
        inputs = dict(reads(text=[words], return_tensors="pt", **media, **told))
    inputs.pop("video_metadata", None)
    return inputs, found


def settings(processor: Any, recipe: Recipe, inputs: Mapping[str, Any]) -> Any:
    """Return transformers' settings of a greedy answer that no token ends."""
    from transformers import GenerationConfig

    begins = {}
    if "decoder_input_ids" in inputs:
        begins = {"decoder_start_token_id": inputs["decoder_input_ids"][0, 0].item()}
    elif recipe.begins:
        begins = {"decoder_start_token_id": processor.tokenizer.convert_tokens_to_ids(recipe.begins)}
    return GenerationConfig(do_sample=False, pad_token_id=0, **begins)


def request(recipe: Recipe, media: Any) -> dict[str, Any]:
    """Return a prompt with these media as the engine takes it."""
    items, words = given(recipe, media), prompt(recipe, media)
    words = words.removeprefix(recipe.start) if recipe.placed else words
    return {"prompt": words} | ({"multi_modal_data": items} if items else {})


def options(recipe: Recipe) -> dict[str, Any]:
    """Return an engine's options that the questions need."""
    most = {"image": recipe.most} if recipe.image else {}
    most |= ({"video": 1} if recipe.video else {}) | ({"audio": recipe.most} if recipe.audio else {})
    sizes = dict(recipe.sizes) or None
    return {"max_model_len": recipe.room, "mm_processor_kwargs": sizes, "limit_mm_per_prompt": most}


def expected(model: Any, processor: Any, recipe: Recipe, asked: Any) -> tuple[list[int], list[int], Any]:
    """Return the prompt's ids, transformers' greedy answer and the logits of each step (N, V)."""
    inputs, found = prepared(processor, recipe, asked)
    greedy = settings(processor, recipe, inputs)
    for part in (recipe.speaker(model), model):
        part.generation_config = copy.deepcopy(greedy)
    model = model if asked else recipe.speaker(model)
    with torch.inference_mode():
        made = model.generate(
            **inputs,
            **recipe.generating,
            max_new_tokens=_ANSWER_TOKENS,
            output_logits=True,
            return_dict_in_generate=True,
        )
    ids = found() if found else inputs["decoder_input_ids" if recipe.start else "input_ids"][0].tolist()
    if recipe.begins:
        ids = [greedy.decoder_start_token_id]
    return ids, made.sequences[0, -len(made.logits) :].tolist(), torch.cat(list(made.logits))


def compare(folder: Path, model: Any, processor: Any, recipe: Recipe) -> str:
    """Return how the engine's answers differ from transformers'; empty if they do not."""
    from tests import census

    asked = questions(recipe)
    wanted = [expected(model, processor, recipe, media) for media in asked]
    requests: list[Any] = [request(recipe, media) for media in asked]
    room = {"max_num_batched_tokens": 64, "num_gpu_blocks_override": 512}
    for way, outputs in census.answers(folder, requests, room | options(recipe)):
        for media, (ids, tokens, logits_NV), output in zip(asked, wanted, outputs, strict=True):
            kind = "sounds" if isinstance(media, Sounds) else "images"
            name = "a prompt with a video" if isinstance(media, str) else f"a prompt of {len(media)} {kind}"
            if list(output.prompt_token_ids)[recipe.unlisted * len(media) :] != ids:
                return f"{way}the ids of {name} differ"
            if said := census.differs(output, tokens, logits_NV):
                return f"{way}of {name}, {said}"
    for kind, other in _others(recipe).items():
        place = next(place for place, media in enumerate(asked) if media and kind == _kind(media))
        if not _shows(model, processor, recipe, other, wanted[place]):
            return f"the answers do not depend on the {kind}"
    return ""


def _kind(media: Any) -> str:
    return "video" if isinstance(media, str) else "sound" if isinstance(media, Sounds) else "image"


def _others(recipe: Recipe) -> dict[str, Any]:
    """Return, for each kind, other media in place of the first prompt's that has such ones, of the same size."""
    found: dict[str, Any] = {"image": [tiny.picture(*QUESTIONS[1][0][:2], 9)]} if recipe.image else {}
    if recipe.video and not recipe.image:
        found["video"] = OTHER_CLIP
    return found | ({"sound": Sounds([_sound(recipe, HEARD[0][0][0], 9)])} if recipe.audio else {})


def _shows(model: Any, processor: Any, recipe: Recipe, other: Any, wanted: tuple[list[int], list[int], Any]) -> bool:
    """Return whether transformers answers otherwise about other media of the same size, so that wrong ones tell."""
    _, _, logits_NV = expected(model, processor, recipe, other)
    count = min(len(logits_NV), len(wanted[2]))
    moved = (logits_NV[:count].log_softmax(-1) - wanted[2][:count].log_softmax(-1)).abs().max()
    return float(moved) > 3 * _TOLERANCE


LANGUAGE = {"hidden_size": 64, "head_dim": 16, "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}
GRID = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")


def _clip(tokenizer: Any) -> Any:
    sizes = {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}}
    image = transformers.CLIPImageProcessor(**sizes)
    return transformers.LlavaProcessor(
        image, tokenizer, patch_size=14, vision_feature_select_strategy="default", image_token="<image>",
        num_additional_image_tokens=1,
    )  # fmt: skip


def _grid(name: str) -> Callable[[Any], Any]:
    """A processor of images at their own size, as Qwen2-VL has it."""

    def made(tokenizer: Any) -> Any:
        sizes = {"min_pixels": 784, "max_pixels": 12544, "patch_size": 14}
        video = transformers.Qwen2VLVideoProcessor(**sizes)
        return getattr(transformers, name)(transformers.Qwen2VLImageProcessor(**sizes), tokenizer, video)

    return made


GRID_VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"
GRID_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"


OVIS_MARKS = ("<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>")


MINICPM_MARKS = (
    *("<|image_pad|>", "<|video_pad|>", "<image>", "</image>", "<slice>", "</slice>", "<image_id>", "</image_id>"),
)


APERTUS_MARKS = (
    *("<|image|>", "<|audio|>", "<|image start|>", "<|image end|>", "<|image token|>", "<|image eol|>"),
    *("<|audio start|>", "<|audio end|>"),
)
STEP_MARKS = ("<im_patch>", "<patch_start>", "<patch_end>", "<patch_newline>", "<im_start>", "<im_end>")


def _apertus_codes(model: Any) -> None:
    """Fill the book of audio codes, which is no parameter, with states of a sound, so that other sounds differ."""
    tokenizer = model.model.audio_tokenizer
    book = tokenizer.quantizer.codebook.embed
    sound = torch.from_numpy(tiny.sound(2.7 * 24000 / tiny.SOUND_RATE, 8)).float()
    with torch.no_grad():
        states = tokenizer.encoder(sound[None, None])[0].T
    book.copy_(states[:: len(states) // len(book)][: len(book)])


def _rotation(theta: float, part: float = 1.0) -> dict[str, Any]:
    return {"partial_rotary_factor": part, "rope_theta": theta, "rope_type": "default"}


COMPASS_MARKS = ("<|IMAGE_PAD|>", "<|VIDEO_PAD|>", "<|VISION_START|>", "<|VISION_END|>")
GLM_MARKS = (
    *("<|image|>", "<|video|>", "<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>"),
)
MUSE_MARKS = (
    *("<|patch|>", "<|image_start|>", "<|image_end|>", "<|video|>", "<|vid_frame_separator|>"),
    *("<|vid_start|>", "<|vid_end|>"),
)


def _kosmos2(tokenizer: Any) -> Any:
    image = transformers.CLIPImageProcessor(size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56})
    return transformers.Kosmos2Processor(image, tokenizer, num_patch_index_tokens=4)


def _git_reader(processor: Any) -> Any:
    """As GIT is asked: an image, and a text that the answer continues."""

    def read(text: list[str], images: Any = None, return_tensors: str = "pt") -> dict[str, Any]:
        words = processor.tokenizer([f"[CLS]{each}" for each in text], add_special_tokens=False, return_tensors="pt")
        seen = processor.image_processor(images[0], return_tensors="pt") if images else {}
        return {**words, **seen}

    return read


def _idefics_reader(processor: Any) -> Any:
    """As IDEFICS is asked: texts and images in turn."""

    def read(text: list[str], images: Any = None, return_tensors: str = "pt") -> dict[str, Any]:
        waiting = iter(images[0] if images else ())
        parts = [next(waiting) if part == "<image>" else part for part in re.split("(<image>)", text[0]) if part]
        made: dict[str, Any] = processor(text=[parts], return_tensors=return_tensors)
        return made

    return read


def _udop(tokenizer: Any) -> Any:
    """Its tokenizer is of another kind."""
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.,?<>|_"
    vocab = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *((letter, -3.0) for letter in ("▁", *letters))]
    images = transformers.LayoutLMv3ImageProcessor(apply_ocr=False, size={"height": 32, "width": 32})
    return transformers.UdopProcessor(images, transformers.UdopTokenizer(vocab=vocab))


def _udop_reader(processor: Any) -> Any:
    """As UDOP is asked: a question, words and their places."""

    def read(text: list[str], images: Any, words: list[str], boxes: list[list[int]], return_tensors: str) -> Any:
        return processor(images[0], text[0], text_pair=words, boxes=boxes, return_tensors=return_tensors)

    return read


# The tokens by which MiniCPM-V 4.7 finds its canvas.
_CANVAS_MARKS = {
    "image_end_id": "</image>",
    "image_start_id": "<image>",
    "newline_id": "\u010a",
    "slice_end_id": "</slice>",
    "slice_start_id": "<slice>",
}


def _minicpmv(name: str) -> Recipe:
    """MiniCPM-V 4.6, and what is made as it is."""
    return Recipe(
        MINICPM_MARKS,
        lambda ids: {
            "image_token_id": ids["<|image_pad|>"],
            "insert_layer_id": 0,
            "text_config": {
                "model_type": "qwen3_5_text",
                "full_attention_interval": 2,
                "hidden_size": 64,
                "head_dim": 32,
                "rope_parameters": {
                    "mrope_section": [2, 1, 1],
                    "partial_rotary_factor": 0.25,
                    "rope_theta": 10000.0,
                    "rope_type": "default",
                },
            },
            "video_token_id": ids["<|video_pad|>"],
            **({key: ids[token] for key, token in _CANVAS_MARKS.items()} if name == "MiniCPMV4_7" else {}),
            "vision_config": {"image_size": 112, "insert_layer_id": 0},
        },
        lambda tokenizer: getattr(transformers, f"{name}Processor")(
            transformers.MiniCPMV4_6ImageProcessor(scale_resolution=56, patch_size=14),
            transformers.MiniCPMV4_6VideoProcessor(scale_resolution=56, patch_size=14),
            tokenizer,
        ),
        "<|image_pad|>",
        {
            "image_token": "<|image_pad|>",
            "video_token": "<|video_pad|>",
            "image_start_token": "<image>",
            "image_end_token": "</image>",
            "slice_start_token": "<slice>",
            "slice_end_token": "</slice>",
            "image_id_start_token": "<image_id>",
            "image_id_end_token": "</image_id>",
        },
        video="<|video_pad|>",
    )


def _blip_video_reader(processor: Any) -> Any:
    """As InstructBLIP-Video is asked: its processor calls a video an image."""

    def read(text: list[str], videos: Any, return_tensors: str = "pt", **unused: Any) -> dict[str, Any]:
        made: dict[str, Any] = processor(images=videos, text=text, return_tensors=return_tensors)
        return made

    return read


def _blip_asked(processor: Any, words: str, images: Any) -> tuple[dict[str, Any], Callable[[], list[int]]]:
    """As BLIP is asked: its generate() puts the decoder's first token in place of [CLS], and drops the last token."""
    ids = processor.tokenizer([f"{words}[SEP]"], add_special_tokens=False, return_tensors="pt")["input_ids"]
    inputs = dict(processor.image_processor(images, return_tensors="pt"), input_ids=ids)
    return inputs, lambda: ids[0, :-1].tolist()


def _instructblip(name: str) -> Recipe:
    """InstructBLIP with Llama, for images or for videos."""
    size = {"height": 56, "width": 56}
    image = name == "InstructBlip"
    mark = "<image>" if image else "<video>"

    def made(tokenizer: Any) -> Any:
        own: Any = transformers.BlipImageProcessor if image else transformers.InstructBlipVideoVideoProcessor
        return getattr(transformers, f"{name}Processor")(own(size=size), tokenizer, tokenizer, num_query_tokens=5)

    return Recipe(
        (mark,),
        lambda ids: {
            f"{mark[1:-1]}_token_index": ids[mark],
            "num_query_tokens": 5,
            "qformer_config": {
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_attention_heads": 2,
                "num_hidden_layers": 2,
                "vocab_size": tiny.VOCAB,
            },
            "text_config": {"model_type": "llama", **LANGUAGE},
            "vision_config": {},
        },
        made,
        mark if image else "",
        video="" if image else mark,
        most=1,
        placed=True,
        frames=4,
        alone=False,
        reader=None if image else _blip_video_reader,
        speaker=lambda model: model.language_model,
    )


# Sizes to which images may be resized before they are cut into tiles.
PINPOINTS = [[56, 112], [112, 56], [112, 112]]
_DEEP_ENCODER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
}


GEMMA_MARKS = ("<|image|>", "<|image>", "<image|>", "<|audio|>", "<|audio>", "<audio|>", "<|video|>")
MINIMAX_MARKS = tuple(f"]<]{name}[>[" for name in ("image", "video", "start of image", "end of image"))
MINICPM_NAMES = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "image_start_token": "<image>",
    "image_end_token": "</image>",
    "slice_start_token": "<slice>",
    "slice_end_token": "</slice>",
    "image_id_start_token": "<image_id>",
    "image_id_end_token": "</image_id>",
}


_T5: dict[str, Any] = {"d_ff": 96, "d_kv": 16, "num_heads": 4, "num_layers": 2, "vocab_size": tiny.VOCAB}
_MBART: dict[str, Any] = {
    "d_model": 64,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 96,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_layers": 2,
    "forced_eos_token_id": None,
    "max_position_embeddings": 256,
    "vocab_size": tiny.VOCAB,
}
_GEMMA: dict[str, Any] = {
    "head_dim": 16,
    "hidden_size": 64,
    "intermediate_size": 96,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "max_position_embeddings": 1024,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "query_pre_attn_scalar": 16,
    "sliding_window": 5,
    "vocab_size": tiny.VOCAB,
}
_SIGLIP: dict[str, Any] = {
    "model_type": "siglip_vision_model",
    "hidden_size": 32,
    "image_size": 56,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "patch_size": 14,
}


RECIPES: dict[str, Recipe] = {
    "udop": Recipe(
        (),
        lambda ids: {
            **_T5,
            "d_model": 64,
            "decoder_start_token_id": 0,
            "eos_token_id": 1,
            "image_size": 32,
            "max_2d_position_embeddings": 1024,
            "pad_token_id": 0,
            "patch_size": 8,
        },
        _udop,
        "<pad>",
        most=1,
        sizes={"words": ["Date", "Total", "nine"], "boxes": [[0, 0, 0, 0], [10, 20, 300, 40], [700, 800, 950, 999]]},
        placed=True,
        begins="<pad>",
        always=True,
        reader=_udop_reader,
    ),
    "pix2struct": Recipe(
        ("<pad>",),
        lambda ids: {
            "text_config": {
                **_T5,
                "decoder_start_token_id": ids["<pad>"],
                "hidden_size": 64,
                "pad_token_id": ids["<pad>"],
                # Answers are longer than the exact buckets and than the farthest distance.
                "relative_attention_max_distance": 6,
                "relative_attention_num_buckets": 6,
            },
            "vision_config": {
                "d_ff": 48,
                "d_kv": 16,
                "hidden_size": 64,
                "num_attention_heads": 4,
                "num_hidden_layers": 2,
                "patch_embed_hidden_size": 48,
                "seq_len": 32,
            },
        },
        lambda tokenizer: transformers.Pix2StructProcessor(
            transformers.Pix2StructImageProcessor(patch_size={"height": 4, "width": 4}), tokenizer
        ),
        "<pad>",
        {"pad_token": "<pad>"},
        most=1,
        sizes={"max_patches": 16},
        start="<pad>",
    ),
    "t5gemma2": Recipe(
        ("<bos>", "<start_of_image>", "<end_of_image>", "<image_soft_token>"),
        lambda ids: {
            "decoder": {**_GEMMA, "bos_token_id": ids["<bos>"]},
            "encoder": {
                "boi_token_index": ids["<start_of_image>"],
                "eoi_token_index": ids["<end_of_image>"],
                "image_token_index": ids["<image_soft_token>"],
                "mm_tokens_per_image": 4,
                "text_config": {"model_type": "t5gemma2_text", **_GEMMA, "bos_token_id": ids["<bos>"]},
                "vision_config": _SIGLIP,
            },
            "image_token_index": ids["<image_soft_token>"],
        },
        lambda tokenizer: transformers.Gemma3Processor(
            transformers.Gemma3ImageProcessor(size={"height": 56, "width": 56}), tokenizer, image_seq_length=4
        ),
        "<start_of_image>",
        {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"},
        begins="<bos>",
    ),
    "vision-encoder-decoder": Recipe(
        ("<s_docvqa>",),
        lambda ids: {
            "decoder": {
                "model_type": "mbart",
                **_MBART,
                "add_cross_attention": True,
                "is_decoder": True,
                "is_encoder_decoder": False,
                "scale_embedding": True,
            },
            "decoder_start_token_id": ids["<s_docvqa>"],
            "encoder": {
                "model_type": "donut-swin",
                "depths": [1, 1],
                "embed_dim": 32,
                "image_size": [64, 56],
                "num_heads": [2, 2],
                "patch_size": 4,
                "window_size": 4,
            },
        },
        lambda tokenizer: transformers.DonutProcessor(
            transformers.DonutImageProcessor(size={"height": 64, "width": 56}), tokenizer
        ),
        "<s_docvqa>",
        most=1,
        room=256,
        start="<s_docvqa>",
    ),
    "cosmos3_edge": Recipe(
        GRID,
        lambda ids: {
            "image_token_id": ids["<|image_pad|>"],
            "projector_hidden_size": 48,
            "text_config": {
                **LANGUAGE,
                "rope_parameters": {"mrope_section": [4, 2, 2], "rope_theta": 1e4, "rope_type": "default"},
            },
            "video_token_id": ids["<|video_pad|>"],
            "vision_config": {"num_patches": 16},
            "vision_end_token_id": ids["<|vision_end|>"],
            "vision_start_token_id": ids["<|vision_start|>"],
        },
        lambda tokenizer: transformers.Cosmos3EdgeProcessor(
            transformers.Cosmos3EdgeImageProcessor(patch_size=14, size={"shortest_edge": 784, "longest_edge": 12544}),
            tokenizer,
            transformers.Cosmos3EdgeVideoProcessor(patch_size=14, size={"shortest_edge": 784, "longest_edge": 25088}),
        ),
        GRID_IMAGE,
        video=GRID_VIDEO,
        options={"return_metadata": True, "return_mm_token_type_ids": True},
    ),
    "cosmos3_omni": Recipe(
        GRID,
        lambda ids: {
            "image_token_id": ids["<|image_pad|>"],
            "text_config": {
                "model_type": "qwen3_vl_text",
                **LANGUAGE,
                "rope_parameters": {
                    "mrope_interleaved": True,
                    "mrope_section": [4, 2, 2],
                    "rope_theta": 1e4,
                    "rope_type": "default",
                },
            },
            "video_token_id": ids["<|video_pad|>"],
            "vision_config": {
                "model_type": "qwen3_vl_vision",
                "deepstack_visual_indexes": [0],
                "num_position_embeddings": 64,
                "out_hidden_size": 64,
            },
            "vision_end_token_id": ids["<|vision_end|>"],
            "vision_start_token_id": ids["<|vision_start|>"],
        },
        lambda tokenizer: transformers.Qwen3VLProcessor(
            transformers.Qwen2VLImageProcessor(patch_size=14, min_pixels=784, max_pixels=12544),
            tokenizer,
            transformers.Qwen3VLVideoProcessor(patch_size=14, size={"shortest_edge": 784, "longest_edge": 25088}),
        ),
        GRID_IMAGE,
        video=GRID_VIDEO,
    ),
    "emu3": Recipe(
        ("<image>", "<|image start|>", "<|image end|>", "<|image token|>", "<|extra_201|>", "<|extra_200|>"),
        lambda ids: {
            "text_config": {**LANGUAGE},
            "vocabulary_map": {
                "<image>": ids["<image>"],
                "<|extra_200|>": ids["<|extra_200|>"],
                **{f"<|visual token {index:06d}|>": 3 + index for index in range(16)},
            },
            "vq_config": {
                "attn_resolutions": [1],
                "base_channels": 32,
                "channel_multiplier": [1, 1, 1, 1],
                "codebook_size": 16,
                "hidden_size": 32,
                "num_res_blocks": 1,
            },
        },
        lambda tokenizer: transformers.Emu3Processor(
            transformers.Emu3ImageProcessor(min_pixels=1024, max_pixels=4096), tokenizer
        ),
        "<image>",
        {
            "boi_token": "<|image start|>",
            "bos_token": "<|endoftext|>",
            "eof_token": "<|extra_201|>",
            "eoi_token": "<|image end|>",
            "image_token": "<image>",
            "image_wrapper_token": "<|image token|>",
        },
        alike=True,
    ),
    "apertus1p5": Recipe(
        APERTUS_MARKS,
        lambda ids: {
            "audio_config": {
                "model_type": "wavtokenizer_encoder",
                "codebook_dim": 32,
                "codebook_size": 32,
                "hidden_size": 32,
                "num_filters": 4,
            },
            "audio_token_id": ids["<|audio|>"],
            # Behind the text's tokens, which alone the head rates, come those of images and those of audio.
            "audio_token_offset": tiny.VOCAB + 16,
            "image_token_id": ids["<|image|>"],
            "image_token_offset": tiny.VOCAB,
            "text_config": {**LANGUAGE, "output_vocab_size": tiny.VOCAB, "vocab_size": tiny.VOCAB + 48},
            "vision_config": {
                "attn_resolutions": [128],
                "base_channels": 32,
                "channel_multiplier": [1, 1, 1, 1, 1],
                "codebook_size": 16,
                "embed_dim": 32,
                "latent_channels": 32,
                "num_res_blocks": 1,
            },
        },
        lambda tokenizer: transformers.Apertus1p5Processor(
            transformers.Apertus1p5ImageProcessor(size={"min_pixels": 1024, "max_pixels": 8192}),
            transformers.WavTokenizerFeatureExtractor(normalize_audio=True),
            tokenizer,
        ),
        "<|image|>",
        dict(
            zip(
                (
                    "image_token",
                    "audio_token",
                    "boi_token",
                    "eoi_token",
                    "image_wrapper_token",
                    "eol_token",
                    "boa_token",
                    "eoa_token",
                ),
                APERTUS_MARKS,
                strict=True,
            )
        ),
        audio="<|audio|>",
        rate=24000,
        settle=_apertus_codes,
    ),
    "gemma4_unified": Recipe(
        GEMMA_MARKS,
        lambda ids: {
            "audio_config": None,
            "audio_token_id": ids["<|audio|>"],
            "boi_token_id": ids["<|image>"],
            "eoi_token_id": ids["<image|>"],
            "image_token_id": ids["<|image|>"],
            "text_config": {
                "global_head_dim": 32,
                "hidden_size": 64,
                "head_dim": 16,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                "num_hidden_layers": 4,
                "sliding_window": 48,
            },
            "video_token_id": ids["<|video|>"],
            "vision_config": {"mm_embed_dim": 64, "mm_posemb_size": 64, "output_proj_dims": 64, "patch_size": 4},
        },
        lambda tokenizer: transformers.Gemma4UnifiedProcessor(
            transformers.Gemma4UnifiedAudioFeatureExtractor(),
            transformers.Gemma4UnifiedImageProcessor(max_soft_tokens=70, patch_size=4),
            tokenizer,
            transformers.Gemma4UnifiedVideoProcessor(max_soft_tokens=70, patch_size=4),
        ),
        "<|image|>",
        {
            "audio_token": "<|audio|>",
            "boa_token": "<|audio>",
            "boi_token": "<|image>",
            "eoa_token": "<audio|>",
            "eoi_token": "<image|>",
            "image_token": "<|image|>",
        },
        video="<|video|>",
    ),
    "blip": Recipe(
        ("[CLS]", "[SEP]", "[DEC]"),
        lambda ids: {
            "text_config": {
                "bos_token_id": ids["[DEC]"],
                "eos_token_id": ids["[SEP]"],
                "hidden_size": 64,
                "intermediate_size": 96,
                "max_position_embeddings": 1024,
                "num_attention_heads": 4,
                "num_hidden_layers": 2,
                "sep_token_id": ids["[SEP]"],
                "vocab_size": tiny.VOCAB,
            },
            "vision_config": {},
        },
        lambda tokenizer: transformers.BlipProcessor(
            transformers.BlipImageProcessor(size={"height": 56, "width": 56}), tokenizer
        ),
        "[CLS]",
        most=1,
        placed=True,
        start="[CLS]",
        asked=_blip_asked,
    ),
    "instructblip": _instructblip("InstructBlip"),
    "instructblipvideo": _instructblip("InstructBlipVideo"),
    "pp_formulanet": Recipe(
        ("</s>",),
        lambda ids: {
            "text_config": {
                "d_model": 64,
                "decoder_attention_heads": 4,
                "decoder_ffn_dim": 96,
                "decoder_layers": 2,
                "decoder_start_token_id": ids["</s>"],
                "eos_token_id": ids["</s>"],
                "forced_eos_token_id": None,
                "max_position_embeddings": 1024,
                "vocab_size": tiny.VOCAB,
            },
            "vision_config": {
                "decoder_hidden_size": 64,
                "global_attn_indexes": [1],
                "image_size": 64,
                "output_channels": 16,
                "patch_size": 8,
                "post_conv_in_channels": 16,
                "post_conv_mid_channels": 24,
                "post_conv_out_channels": 32,
                "window_size": 3,
            },
        },
        lambda tokenizer: transformers.PPFormulaNetProcessor(
            transformers.PPFormulaNetImageProcessor(size={"height": 64, "width": 64}), tokenizer
        ),
        "</s>",
        most=1,
        placed=True,
        start="</s>",
    ),
    "git": Recipe(
        ("[PAD]", "[CLS]"),
        lambda ids: {
            "hidden_size": 64,
            "intermediate_size": 96,
            "max_position_embeddings": 1024,
            "num_attention_heads": 4,
            "num_hidden_layers": 2,
            "vision_config": {},
            "vocab_size": tiny.VOCAB,
        },
        lambda tokenizer: transformers.GitProcessor(
            transformers.CLIPImageProcessor(size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56}),
            tokenizer,
        ),
        "[PAD]",
        most=1,
        placed=True,
        reader=_git_reader,
        unlisted=17,
        # transformers 5.17 counts the positions of cached tokens twice.
        generating={} if Version(transformers.__version__) >= Version("5.18") else {"use_cache": False},
    ),
    "idefics": Recipe(
        ("<s>", "</s>", "<fake_token_around_image>", "<image>"),
        lambda ids: {
            "additional_vocab_size": 2,
            "alpha_initializer": "ones",
            "cross_layer_interval": 2,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_attention_heads": 4,
            "num_hidden_layers": 4,
            "perceiver_config": {
                "resampler_depth": 1,
                "resampler_head_dim": 16,
                "resampler_n_heads": 2,
                "resampler_n_latents": 6,
            },
            "qk_layer_norms": True,
            "use_resampler": True,
            "vision_config": {"embed_dim": 32},
            # The tokens of images have embeddings of their own.
            "vocab_size": ids["<fake_token_around_image>"],
        },
        lambda tokenizer: transformers.IdeficsProcessor(transformers.IdeficsImageProcessor(image_size=56), tokenizer),
        "<image>",
        {"bos_token": "<s>", "eos_token": "</s>"},
        reader=_idefics_reader,
    ),
    "kosmos-2": Recipe(
        ("<s>", "<image>", "</image>", "<unk>"),
        lambda ids: {
            # The files of its processor do not keep another number.
            "latent_query_num": 64,
            "text_config": {
                "attention_heads": 4,
                "embed_dim": 64,
                "layers": 2,
                "max_position_embeddings": 1040,
                "pad_token_id": 1,
            },
            "vision_config": {},
        },
        _kosmos2,
        "<image></image>",
        {"bos_token": "<s>", "unk_token": "<unk>"},
        most=1,
        placed=True,
        speaker=lambda model: model.text_model,
    ),
    "kosmos-2.5": Recipe(
        ("<s>", "<image>", "</image>"),
        lambda ids: {
            "latent_query_num": 6,
            "text_config": {"attention_heads": 4, "embed_dim": 64, "layers": 2, "max_position_embeddings": 1040},
            "vision_config": {"head_dim": 16, "patch_embed_hidden_size": 48},
        },
        lambda tokenizer: transformers.Kosmos2_5Processor(
            transformers.Kosmos2_5ImageProcessor(patch_size={"height": 4, "width": 4}), tokenizer, num_image_tokens=6
        ),
        "<image></image>",
        {"bos_token": "<s>", "boi_token": "<image>", "eoi_token": "</image>", "image_token": "<s>"},
        most=1,
        alone=False,
        sizes={"max_patches": 16},
        placed=True,
    ),
    "lfm3_vl": Recipe(
        GRID,
        lambda ids: {
            "image_token_id": ids["<|image_pad|>"],
            "projector_hidden_size": 48,
            "text_config": {
                "model_type": "lfm3",
                "conv_L_cache": 4,
                "head_dim": 16,
                "hidden_size": 64,
                "layer_types": ["conv", "sliding_attention", "conv", "full_attention"],
                "num_hidden_layers": 4,
                "sliding_window": 24,
            },
            "video_token_id": ids["<|video_pad|>"],
            "vision_config": {"layer_types": ["conv", "full_attention"]},
            "vision_end_token_id": ids["<|vision_end|>"],
            "vision_start_token_id": ids["<|vision_start|>"],
        },
        lambda tokenizer: transformers.Lfm3VlProcessor(
            transformers.Qwen2VLImageProcessor(patch_size=14, min_pixels=784, max_pixels=12544),
            tokenizer,
            transformers.Qwen3VLVideoProcessor(patch_size=14, size={"shortest_edge": 784, "longest_edge": 25088}),
        ),
        GRID_IMAGE,
        video=GRID_VIDEO,
    ),
    "minicpm_ocr": Recipe(
        MINICPM_MARKS,
        lambda ids: {
            "image_token_id": ids["<|image_pad|>"],
            "insert_layer_id": 0,
            "text_config": {
                "model_type": "qwen3_5_text",
                "full_attention_interval": 2,
                "hidden_size": 64,
                "head_dim": 32,
                "rope_parameters": {"mrope_section": [2, 1, 1], **_rotation(1e4, 0.25)},
            },
            "video_token_id": ids["<|video_pad|>"],
            "vision_config": {"image_size": 112, "insert_layer_id": 0},
        },
        lambda tokenizer: transformers.MiniCPMOcrProcessor(
            transformers.MiniCPMOcrImageProcessor(scale_resolution=56, patch_size=14),
            transformers.MiniCPMOcrVideoProcessor(scale_resolution=56, patch_size=14),
            tokenizer,
        ),
        "<|image_pad|>",
        MINICPM_NAMES,
        video="<|video_pad|>",
    ),
    "minimax_m3_vl": Recipe(
        MINIMAX_MARKS,
        lambda ids: {
            "image_token_index": ids["]<]image[>["],
            "projector_hidden_size": 48,
            "text_config": {
                **LANGUAGE,
                "dense_intermediate_size": 96,
                "index_head_dim": 16,
                "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
                "num_hidden_layers": 4,
                "rotary_dim": 8,
            },
            "video_token_index": ids["]<]video[>["],
            "vision_config": {},
        },
        lambda tokenizer: transformers.MiniMaxM3VLProcessor(
            transformers.MiniMaxM3VLImageProcessor(patch_size=14, size={"shortest_edge": 784, "longest_edge": 12544}),
            tokenizer,
            transformers.MiniMaxM3VLVideoProcessor(patch_size=14, size={"shortest_edge": 784, "longest_edge": 25088}),
        ),
        "]<]image[>[",
        video="]<]video[>[",
        options={"return_metadata": True},
    ),
    "muse_spark": Recipe(
        (*MUSE_MARKS, "<|audio|>", "<|soft_audio_start|>", "<|soft_audio_end|>"),
        lambda ids: {
            "audio_config": {
                "depths": [1, 1],
                "hidden_sizes": [16, 32],
                "num_hidden_layers": 2,
                "out_hidden_size": 64,
                "patch_sizes": [16, 40],
            },
            "audio_token_id": ids["<|audio|>"],
            "image_token_id": ids["<|patch|>"],
            "out_hidden_size": 128,
            "projector_hidden_size": 48,
            "text_config": {
                **LANGUAGE,
                "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
                "moe_hidden_size": 32,
                "num_hidden_layers": 4,
                "sliding_window": 24,
            },
            "video_token_id": ids["<|video|>"],
            "vision_config": {"max_position_embeddings": 16, "pos_emb_height": 4, "pos_emb_width": 4},
        },
        lambda tokenizer: transformers.MuseSparkProcessor(
            transformers.MuseGlimmerImageProcessor(max_image_tokens=16, patch_size=14),
            transformers.MuseGlimmerVideoProcessor(max_video_frame_tokens=8, patch_size=14),
            tokenizer,
            transformers.MuseSparkFeatureExtractor(samples_per_token=640),
        ),
        "<|patch|>",
        video="<|video|>",
        options={"return_metadata": True},
    ),
    "cohere_compass": Recipe(
        COMPASS_MARKS,
        lambda ids: {
            "image_token_id": ids["<|IMAGE_PAD|>"],
            "text_config": {
                "head_dim": 16,
                "hidden_size": 64,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                "logit_scale": 0.5,
                "num_hidden_layers": 4,
                # Full layers have no positions.
                "rope_parameters": {
                    "full_attention": None,
                    "sliding_attention": {"mrope_section": [4, 2, 2], "rope_theta": 1e4, "rope_type": "default"},
                },
                "sliding_window": 24,
            },
            "video_token_id": ids["<|VIDEO_PAD|>"],
            "vision_config": {"deepstack_visual_indexes": [0], "num_position_embeddings": 64, "out_hidden_size": 64},
            "vision_end_token_id": ids["<|VISION_END|>"],
            "vision_start_token_id": ids["<|VISION_START|>"],
        },
        lambda tokenizer: transformers.CohereCompassProcessor(
            transformers.CohereCompassImageProcessor(patch_size=14, min_pixels=784, max_pixels=12544),
            tokenizer,
            transformers.CohereCompassVideoProcessor(patch_size=14, size={"shortest_edge": 784, "longest_edge": 25088}),
        ),
        "<|VISION_START|><|IMAGE_PAD|><|VISION_END|>",
        video="<|VISION_START|><|VIDEO_PAD|><|VISION_END|>",
    ),
    "deepseek_ocr2": Recipe(
        ("<image>",),
        lambda ids: {
            "image_token_id": ids["<image>"],
            "text_config": {
                "hidden_size": 64,
                "max_position_embeddings": 2048,
                "mlp_layer_types": ["dense", "sparse"],
                "num_hidden_layers": 2,
                "num_key_value_heads": 4,
            },
            "vision_config": {
                "encoder_config": _DEEP_ENCODER,
                "sam_config": {
                    "downsample_channels": [16, 32],
                    "global_attn_indexes": [],
                    "hidden_size": 16,
                    "image_size": 128,
                    "num_attention_heads": 2,
                    "num_hidden_layers": 2,
                    "output_channels": 16,
                    "patch_size": 2,
                    "window_size": 4,
                },
            },
        },
        lambda tokenizer: transformers.DeepseekOcr2Processor(
            transformers.DeepseekOcr2ImageProcessor(
                max_patches=3, min_patches=2, size={"height": 128, "width": 128}, tile_size=96
            ),
            tokenizer,
            patch_size=2,
        ),
        "<image>",
        # Before 5.20, its processor reads no text without an image.
        alone=False,
        room=2048,
    ),
    "granite4_vision": Recipe(
        ("<image>",),
        lambda ids: {
            # Each of the tower's layers enters a text layer of its own.
            "deepstack_layer_map": [[-1, 0], [-2, 1]],
            "downsample_rate": "1/2",
            "image_grid_pinpoints": PINPOINTS,
            "image_token_index": ids["<image>"],
            # What follows from the tower's width is said for versions before 5.23, which read the Q-Former's alone.
            "qformer_config": {
                "model_type": "blip_2_qformer",
                "cross_attention_frequency": 1,
                "encoder_hidden_size": 64,
                "hidden_size": 64,
                "num_attention_heads": 1,
            },
            "spatial_target_layers": [2, 3, 4, 5],
            "text_config": {**LANGUAGE, "embedding_multiplier": 2.0, "logits_scaling": 2.0, "num_hidden_layers": 6},
            "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 64},
            "vision_feature_select_strategy": "full",
        },
        lambda tokenizer: transformers.Granite4VisionProcessor(
            transformers.LlavaNextImageProcessor(
                crop_size={"height": 56, "width": 56}, image_grid_pinpoints=PINPOINTS, size={"shortest_edge": 56}
            ),
            tokenizer,
            patch_size=14,
            vision_feature_select_strategy="full",
            downsample_rate="1/2",
        ),
        "<image>",
    ),
    "glmga": Recipe(
        GLM_MARKS,
        lambda ids: {
            "image_end_token_id": ids["<|end_of_image|>"],
            "image_start_token_id": ids["<|begin_of_image|>"],
            "image_token_id": ids["<|image|>"],
            "text_config": {
                "model_type": "glm4v_text",
                "hidden_size": 64,
                "rope_parameters": {"mrope_section": [2, 1, 1], **_rotation(1e4, 0.5)},
            },
            "video_end_token_id": ids["<|end_of_video|>"],
            "video_start_token_id": ids["<|begin_of_video|>"],
            "video_token_id": ids["<|video|>"],
            "vision_config": {"model_type": "glm4v_vision", "image_size": 56, "out_hidden_size": 64},
        },
        lambda tokenizer: transformers.Glm46VProcessor(
            transformers.GlmgaImageProcessor(patch_size=14, size={"shortest_edge": 784, "longest_edge": 12544}),
            tokenizer,
            transformers.GlmgaVideoProcessor(patch_size=14, size={"shortest_edge": 784, "longest_edge": 25088}),
        ),
        "<|begin_of_image|><|image|><|end_of_image|>",
        {"image_token": "<|image|>", "video_token": "<|video|>"},
        video="<|begin_of_video|><|video|><|end_of_video|>",
    ),
    "muse_glimmer": Recipe(
        MUSE_MARKS,
        lambda ids: {
            "image_token_id": ids["<|patch|>"],
            "out_hidden_size": 128,
            "projector_hidden_size": 48,
            # Every fourth layer has no positions.
            "text_config": {**LANGUAGE, "num_hidden_layers": 4, "sliding_window": 24},
            "video_token_id": ids["<|video|>"],
            "vision_config": {"max_position_embeddings": 16, "pos_emb_height": 4, "pos_emb_width": 4},
        },
        lambda tokenizer: transformers.MuseGlimmerProcessor(
            transformers.MuseGlimmerImageProcessor(max_image_tokens=16, patch_size=14),
            transformers.MuseGlimmerVideoProcessor(max_video_frame_tokens=8, patch_size=14),
            tokenizer,
        ),
        "<|patch|>",
        video="<|video|>",
        options={"return_metadata": True},
    ),
    "pp_chart2table": Recipe(
        ("<img>", "</img>", "<imgpad>"),
        lambda ids: {
            "image_seq_length": 4,
            "image_token_index": ids["<imgpad>"],
            "text_config": {"model_type": "qwen2", **LANGUAGE},
            "vision_config": {
                "global_attn_indexes": [1],
                "image_size": 128,
                "output_channels": 16,
                "patch_size": 16,
                "window_size": 2,
            },
        },
        lambda tokenizer: transformers.PPChart2TableProcessor(
            transformers.PPChart2TableImageProcessor(size={"height": 128, "width": 128}), tokenizer
        ),
        "<img>" + "<imgpad>" * 4 + "</img>",
        alone=False,
    ),
    "nemotron_h_omni": Recipe(
        ("<image>", "<video>", "<img>", "</img>", "<so_embedding>", "<so_start>", "<so_end>"),
        lambda ids: {
            "audio_config": None,
            "image_token_id": ids["<image>"],
            "projector_hidden_size": 48,
            "text_config": {
                "model_type": "nemotron_h",
                "head_dim": 16,
                "hidden_size": 64,
                "layers_block_type": ["mamba", "attention", "moe", "mlp"],
                "mamba_head_dim": 16,
                "mamba_num_heads": 8,
                "moe_shared_expert_intermediate_size": 32,
                "n_groups": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "ssm_state_size": 16,
            },
            "video_token_id": ids["<video>"],
            "vision_config": {
                "model_type": "radio",
                "image_size": 64,
                "patch_size": 16,
                "video_temporal_patch_size": 2,
            },
            "vision_hidden_size": 32,
        },
        lambda tokenizer: transformers.NemotronH_Omni_Reasoning_V3Processor(
            transformers.NemotronH_Omni_Reasoning_V3ImageProcessor(
                max_num_patches=64, min_num_patches=16, norm_mean=[0.5] * 3, norm_std=[0.5] * 3
            ),
            transformers.NemotronH_Omni_Reasoning_V3VideoProcessor(
                norm_mean=[0.5] * 3, norm_std=[0.5] * 3, video_target_num_patches=16
            ),
            tokenizer,
            transformers.ParakeetFeatureExtractor(),
        ),
        "<image>",
    ),
    "shieldgemma2": Recipe(
        ("<start_of_image>", "<end_of_image>", "<image_soft_token>"),
        lambda ids: {
            "boi_token_index": ids["<start_of_image>"],
            "eoi_token_index": ids["<end_of_image>"],
            "image_token_index": ids["<image_soft_token>"],
            "mm_tokens_per_image": 4,
            "text_config": {
                "model_type": "gemma3_text",
                "hidden_size": 64,
                "head_dim": 16,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                "num_hidden_layers": 4,
                "sliding_window": 24,
            },
            "vision_config": {"model_type": "siglip_vision_model", "vision_use_head": False},
        },
        lambda tokenizer: transformers.ShieldGemma2Processor(
            transformers.Gemma3ImageProcessor(size={"height": 56, "width": 56}), tokenizer, image_seq_length=4
        ),
        "<start_of_image>",
        {
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
            "image_token": "<image_soft_token>",
        },
        wrapped_by="ShieldGemma2ForImageClassification",
        # The processor writes the prompt itself, of policies.
        reader=lambda processor: transformers.Gemma3Processor(
            processor.image_processor, processor.tokenizer, image_seq_length=4
        ),
    ),
    "fast_vlm": Recipe(
        ("<image>",),
        lambda ids: {
            "image_token_index": ids["<image>"],
            "text_config": {"model_type": "qwen2", **LANGUAGE},
            "vision_config": {
                "model_type": "timm_wrapper",
                "architecture": "fastvit_mci3",
                "do_pooling": True,
                "global_pool": "avg",
                "hidden_size": 64,
                "model_args": {"embed_dims": [16, 16, 16, 32, 32], "inference_mode": True, "layers": [1] * 5},
                "num_classes": 0,
            },
        },
        lambda tokenizer: transformers.LlavaProcessor(
            transformers.CLIPImageProcessor(
                crop_size={"height": 128, "width": 128},
                image_mean=[0.0] * 3,
                image_std=[1.0] * 3,
                size={"shortest_edge": 128},
            ),
            tokenizer,
            patch_size=64,
            vision_feature_select_strategy="full",
            image_token="<image>",
            num_additional_image_tokens=0,
        ),
        "<image>",
    ),
    "step3p7": Recipe(
        STEP_MARKS,
        lambda ids: {
            "image_token_id": ids["<im_patch>"],
            "text_config": {
                **LANGUAGE,
                "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
                "mlp_layer_types": ["dense", "dense", "sparse", "sparse"],
                "moe_intermediate_size": 48,
                "n_routed_experts": 4,
                "num_experts_per_tok": 2,
                "num_hidden_layers": 4,
                "num_local_experts": 4,
                # Layers of both kinds have different numbers of heads.
                "num_sliding_attention_heads": 8,
                "rope_parameters": {"full_attention": _rotation(1e5, 0.5), "sliding_attention": _rotation(1e4)},
                "share_expert_dim": 48,
                "sliding_window": 8,
            },
            "vision_config": {"image_size": 112, "max_position_embeddings": 64, "mlp_ratio": 1.5},
        },
        lambda tokenizer: transformers.Step3p7Processor(
            transformers.Step3p7ImageProcessor(max_image_size=224, patch_size=56, size={"height": 112, "width": 112}),
            tokenizer,
        ),
        "<im_patch>",
    ),
    "vipllava": Recipe(
        ("<image>",),
        lambda ids: {
            "image_token_index": ids["<image>"],
            "text_config": {"model_type": "llama", **LANGUAGE},
            "vision_config": {"model_type": "clip_vision_model", "num_hidden_layers": 3, "projection_dim": 32},
            "vision_feature_layers": [-2, -3, 1],
        },
        _clip,
        "<image>",
    ),
    "ovis2": Recipe(
        ("<image>", "<IMG_ATOM>", *OVIS_MARKS),
        lambda ids: {
            "hidden_size": 64,
            "image_token_id": ids["<IMG_ATOM>"],
            "text_config": {"model_type": "qwen2", **LANGUAGE},
            "vision_config": {"vocab_size": 40, "hidden_stride": 2},
            "visual_indicator_token_ids": [ids[mark] for mark in OVIS_MARKS],
            "vocab_size": tiny.VOCAB,
        },
        lambda tokenizer: transformers.Ovis2Processor(
            transformers.Ovis2ImageProcessor(size={"height": 56, "width": 56}), tokenizer, image_seq_length=4
        ),
        "<image>",
    ),
    "exaone4_5": Recipe(
        GRID,
        lambda ids: {
            "image_token_id": ids["<|image_pad|>"],
            "text_config": {"model_type": "exaone4", **LANGUAGE},
            # Before 5.23, num_hidden_layers is no other name of it.
            "vision_config": {"depth": 2, "fullatt_block_indexes": [1], "out_hidden_size": 64, "window_size": 56},
            "video_token_id": ids["<|video_pad|>"],
        },
        _grid("Exaone4_5_Processor"),
        GRID_IMAGE,
        video=GRID_VIDEO,
    ),
    "perception_lm": Recipe(
        ("<|image|>", "<|video|>"),
        lambda ids: {
            "image_token_id": ids["<|image|>"],
            "projector_pooling_ratio": 2,
            "text_config": {"model_type": "llama", **LANGUAGE},
            "video_token_id": ids["<|video|>"],
            "vision_config": {
                "model_type": "timm_wrapper",
                "architecture": "vit_pe_core_large_patch14_336",
                "do_pooling": False,
                "model_args": {
                    "depth": 2,
                    "embed_dim": 32,
                    "global_pool": "",
                    "img_size": [56, 56],
                    "init_values": 0.1,
                    "num_heads": 2,
                    "ref_feat_shape": [4, 4],
                    "use_post_transformer_norm": False,
                },
                "num_classes": 0,
            },
        },
        lambda tokenizer: transformers.PerceptionLMProcessor(
            transformers.PerceptionLMVideoProcessor(size={"height": 56, "width": 56}),
            transformers.PerceptionLMImageProcessor(tile_size=56, max_num_tiles=4),
            tokenizer,
            patch_size=14,
            pooling_ratio=2,
        ),
        "<|image|>",
        {"image_token": "<|image|>", "video_token": "<|video|>"},
        video="<|video|>",
    ),
    "idefics2": Recipe(
        ("<fake_token_around_image>", "<image>", "<end_of_utterance>"),
        lambda ids: {
            "image_token_id": ids["<image>"],
            "perceiver_config": {
                "hidden_size": 64,
                "num_key_value_heads": 2,
                "resampler_depth": 2,
                "resampler_head_dim": 16,
                "resampler_n_heads": 4,
                "resampler_n_latents": 6,
            },
            "text_config": {"model_type": "mistral", **LANGUAGE},
            "vision_config": {"image_size": 70},
        },
        lambda tokenizer: transformers.Idefics2Processor(
            transformers.Idefics2ImageProcessor(
                do_image_splitting=True, size={"longest_edge": 70, "shortest_edge": 28}
            ),
            tokenizer,
            image_seq_len=6,
        ),
        "<image>",
    ),
    "qianfan_ocr": Recipe(
        ("<image>", "<img>", "</img>", "<IMG_CONTEXT>"),
        lambda ids: {
            "downsample_ratio": 0.5,
            "image_seq_length": 4,
            "image_token_id": ids["<IMG_CONTEXT>"],
            "text_config": {"model_type": "qwen3", **LANGUAGE},
            "vision_config": {"image_size": [56, 56], "patch_size": [14, 14]},
        },
        lambda tokenizer: transformers.QianfanOCRProcessor(
            transformers.GotOcr2ImageProcessor(
                crop_to_patches=True, max_patches=4, min_patches=1, size={"height": 56, "width": 56}
            ),
            tokenizer,
            image_seq_length=4,
        ),
        "<image>",
        {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>"},
    ),
    "video_llama_3": Recipe(
        GRID,
        lambda ids: {
            "image_token_id": ids["<|image_pad|>"],
            "text_config": {"model_type": "qwen2", **LANGUAGE},
            "video_token_id": ids["<|video_pad|>"],
            "vision_config": {},
        },
        lambda tokenizer: transformers.VideoLlama3Processor(
            transformers.VideoLlama3ImageProcessor(patch_size=14, size={"shortest_edge": 784, "longest_edge": 12544}),
            tokenizer,
            transformers.VideoLlama3VideoProcessor(patch_size=14),
        ),
        "<|image_pad|>",
    ),
    "hyperclovax_vision_v2": Recipe(
        GRID,
        lambda ids: {
            "image_token_id": ids["<|image_pad|>"],
            "text_config": {"model_type": "hyperclovax", **LANGUAGE},
            "video_token_id": ids["<|video_pad|>"],
            "vision_config": {
                "model_type": "qwen2_5_vl_vision",
                "fullatt_block_indexes": [1],
                "out_hidden_size": 64,
                "window_size": 56,
            },
        },
        _grid("HyperCLOVAXVisionV2Processor"),
        GRID_IMAGE,
        video=GRID_VIDEO,
    ),
    "granite_docling": Recipe(
        (
            "<fake_token_around_image>",
            "<image>",
            "<global-img>",
            *(f"<row_{r}_col_{c}>" for r in (1, 2, 3) for c in (1, 2, 3)),
        ),
        lambda ids: {
            "image_token_id": ids["<image>"],
            "text_config": {**LANGUAGE},
            "vision_config": {
                "out_hidden_size": 64,
                "scale_factor": 2,
                "deepstack_visual_indexes": [0],
                "use_fine_route": False,
            },
        },
        lambda tokenizer: transformers.GraniteDoclingProcessor(
            transformers.GraniteDoclingImageProcessor(max_patches=6, size={"height": 56, "width": 56}),
            tokenizer,
            image_seq_len=4,
        ),
        "<image>",
    ),
    "deepseek_vl": Recipe(
        ("<image_placeholder>",),
        lambda ids: {
            "image_token_id": ids["<image_placeholder>"],
            "text_config": {"model_type": "llama", **LANGUAGE},
            "vision_config": {"model_type": "siglip_vision_model"},
        },
        lambda tokenizer: transformers.DeepseekVLProcessor(
            transformers.DeepseekVLImageProcessor(size={"height": 56, "width": 56}, min_size=14),
            tokenizer,
            num_image_tokens=16,
        ),
        "<image_placeholder>",
        {"image_token": "<image_placeholder>"},
    ),
    "kimi_k25": Recipe(
        ("<|media_begin|>", "<|media_content|>", "<|media_pad|>", "<|media_end|>", "<|kimi_k25_video_placeholder|>"),
        lambda ids: {
            "image_token_id": ids["<|media_pad|>"],
            "projection_hidden_size": 32,
            "text_config": {
                "model_type": "deepseek_v3",
                "first_k_dense_replace": 1,
                "num_key_value_heads": 4,
                "q_lora_rank": 24,
                **LANGUAGE,
                "head_dim": 8,
            },
            "video_token_id": ids["<|kimi_k25_video_placeholder|>"],
            "vision_config": {"pos_emb_height": 8, "pos_emb_width": 8},
            "vision_end_token_id": ids["<|media_end|>"],
            "vision_start_token_id": ids["<|media_begin|>"],
        },
        lambda tokenizer: transformers.Kimi_K25Processor(
            transformers.Kimi_K25ImageProcessor(), tokenizer, transformers.Kimi_K25VideoProcessor()
        ),
        "<|media_begin|>image<|media_content|><|media_pad|><|media_end|>",
        {"image_token": "<|media_pad|>", "video_token": "<|kimi_k25_video_placeholder|>"},
    ),
    "deepseek_vl_hybrid": Recipe(
        ("<image_placeholder>",),
        lambda ids: {
            "high_res_vision_config": {
                "model_type": "sam_vision_model",
                "global_attn_indexes": [1],
                "hidden_size": 32,
                "image_size": 128,
                "mlp_dim": 48,
                "num_attention_heads": 2,
                "num_hidden_layers": 2,
                "output_channels": 16,
                "patch_size": 16,
                "window_size": 2,
            },
            "image_token_id": ids["<image_placeholder>"],
            "text_config": {"model_type": "llama", **LANGUAGE},
            "vision_config": {"model_type": "siglip_vision_model", "image_size": 64, "patch_size": 16},
        },
        lambda tokenizer: transformers.DeepseekVLHybridProcessor(
            transformers.DeepseekVLHybridImageProcessor(
                high_res_size={"height": 128, "width": 128}, min_size=14, size={"height": 64, "width": 64}
            ),
            tokenizer,
            num_image_tokens=16,
        ),
        "<image_placeholder>",
        {"image_token": "<image_placeholder>"},
    ),
    "janus": Recipe(
        ("<image_placeholder>", "<begin_of_image>", "<end_of_image>"),
        lambda ids: {
            "image_token_id": ids["<image_placeholder>"],
            "text_config": {"model_type": "llama", **LANGUAGE},
            "vision_config": {"num_image_tokens": 16, "projection_dim": 64, "mlp_ratio": 2.0},
            "vq_config": {
                "base_channels": 32,
                "channel_multiplier": [1, 1],
                "embed_dim": 8,
                "image_token_embed_dim": 64,
                "latent_channels": 32,
                "num_embeddings": 32,
                "num_patches": 4,
                "num_res_blocks": 1,
                "projection_dim": 64,
            },
        },
        lambda tokenizer: transformers.JanusProcessor(
            transformers.JanusImageProcessor(size={"height": 56, "width": 56}, min_size=14),
            tokenizer,
            num_image_tokens=16,
        ),
        "<image_placeholder>",
        {"image_token": "<image_placeholder>", "boi_token": "<begin_of_image>", "eoi_token": "<end_of_image>"},
    ),
    "video_llava": Recipe(
        ("<image>", "<video>"),
        lambda ids: {
            "image_token_index": ids["<image>"],
            "text_config": {"model_type": "llama", **LANGUAGE},
            "video_token_index": ids["<video>"],
            "vision_config": {"model_type": "clip_vision_model", "num_hidden_layers": 3, "projection_dim": 32},
        },
        lambda tokenizer: transformers.VideoLlavaProcessor(
            transformers.VideoLlavaImageProcessor(size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56}),
            transformers.VideoLlavaVideoProcessor(size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56}),
            tokenizer,
            patch_size=14,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
        ),
        "<image>",
        video="<video>",
    ),
    "minicpmv4_6": _minicpmv("MiniCPMV4_6"),
    "minicpmv4_7": _minicpmv("MiniCPMV4_7"),
}
