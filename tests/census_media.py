"""The census of types that read images: a tiny checkpoint of each, its processor included, made of a recipe.

A recipe says what a type's configuration and processor need beyond small sizes. Prompts with no, one and two images are
compared with transformers' generate(), the prompts' ids included.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

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
        image: an image's text in a prompt.
        named: attributes of the tokenizer that name tokens.
        most: images in one prompt.
        flat: whether the processor takes a prompt's images as a flat list.
    """

    tokens: tuple[str, ...]
    config: Callable[[Mapping[str, int]], dict[str, Any]]
    processor: Callable[[Any], Any]
    image: str
    named: Mapping[str, str] = field(default_factory=dict)
    most: int = 2
    flat: bool = False


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
    return known(**made)


def make(kind: str, recipe: Recipe, folder: Path) -> tuple[Any, Any]:
    """Write a tiny checkpoint of this type into the empty folder; returns transformers' model and processor of it."""
    from transformers import AutoModelForMultimodalLM, AutoProcessor, AutoTokenizer

    specials = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *recipe.tokens)
    settings = {"extra_special_tokens": dict(recipe.named)} | dict(recipe.named) if recipe.named else {}
    ids = text.write_qwen_tokenizer(folder, specials, "<|im_end|>", settings)
    processor = recipe.processor(AutoTokenizer.from_pretrained(folder))
    processor.save_pretrained(folder)
    config = tiny_config(kind, recipe.config(ids))
    kind_of_model = AutoModelForMultimodalLM._model_mapping[type(config)]
    torch.manual_seed(0)
    model = kind_of_model._from_config(config, dtype=torch.float32).eval()
    tiny._fill(model)
    model.config.architectures = [type(model).__name__]
    model.save_pretrained(folder)
    loaded = kind_of_model.from_pretrained(folder, dtype=torch.float32).eval()
    return loaded, AutoProcessor.from_pretrained(folder)


QUESTIONS = ((), ((84, 56, 1),), ((56, 112, 2),), ((84, 56, 3), (112, 70, 4)))


def prompt(recipe: Recipe, count: int) -> str:
    """Return a prompt of so many images."""
    return f"<|im_start|>user\n{recipe.image * count}What is it, and where does it stand?<|im_end|>\n<|im_start|>assistant\n"


def expected(model: Any, processor: Any, recipe: Recipe, pictures: list[Any]) -> tuple[list[int], list[int], Any]:
    """Return the prompt's ids, transformers' greedy answer and the logits of each step (N, V)."""
    from transformers import GenerationConfig

    words = prompt(recipe, len(pictures))
    media = {"images": pictures if recipe.flat else [pictures]} if pictures else {}
    inputs = dict(processor(text=[words], return_tensors="pt", **media))
    model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)
    with torch.inference_mode():
        made = model.generate(
            **inputs, max_new_tokens=_ANSWER_TOKENS, output_logits=True, return_dict_in_generate=True
        )  # fmt: skip
    ids = inputs["input_ids"][0].tolist()
    return ids, made.sequences[0, -len(made.logits) :].tolist(), torch.cat(list(made.logits))


def compare(folder: Path, model: Any, processor: Any, recipe: Recipe) -> str:
    """Return how the engine's answers differ from transformers'; empty if they do not."""
    from beheld import LLM, SamplingParams

    asked = [[tiny.picture(*each) for each in images] for images in QUESTIONS if len(images) <= recipe.most]
    wanted = [expected(model, processor, recipe, pictures) for pictures in asked]
    params = SamplingParams(temperature=0, max_tokens=_ANSWER_TOKENS, ignore_eos=True, logprobs=1)
    requests: list[Any] = []
    for pictures in asked:
        media = {"multi_modal_data": {"image": pictures if len(pictures) > 1 else pictures[0]}} if pictures else {}
        requests.append({"prompt": prompt(recipe, len(pictures)), **media})
    with LLM(
        model=str(folder), dtype="float32", max_model_len=1024, num_gpu_blocks_override=512, disable_log_stats=True,
        max_num_seqs=4, max_num_batched_tokens=64, block_size=8, limit_mm_per_prompt={"image": recipe.most},
    ) as llm:  # fmt: skip
        outputs = llm.generate(requests, params, use_tqdm=False)
    for pictures, (ids, tokens, logits_NV), output in zip(asked, wanted, outputs, strict=True):
        name = f"a prompt of {len(pictures)} images"
        if list(output.prompt_token_ids) != ids:
            return f"the ids of {name} differ"
        logprobs_NV, steps = logits_NV.log_softmax(-1), output.outputs[0].logprobs
        for step, token in enumerate(output.outputs[0].token_ids):
            off = abs(float(logprobs_NV[step, token]) - steps[step][token].logprob)
            if not off < _TOLERANCE:
                return f"of {name}, at step {step} a log-probability is off by {off:.2g}"
            if token != tokens[step]:
                break
    return ""


LANGUAGE = {"hidden_size": 64, "head_dim": 16, "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}
GRID = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")


def _clip(tokenizer: Any) -> Any:
    sizes = {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}}
    image = transformers.CLIPImageProcessor(**sizes)
    return transformers.LlavaProcessor(
        image, tokenizer, patch_size=14, vision_feature_select_strategy="default", image_token="<image>",
        num_additional_image_tokens=1,
    )  # fmt: skip


RECIPES: dict[str, Recipe] = {
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
}
