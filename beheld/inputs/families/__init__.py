"""Families whose prompts or processors need a word of help, one small file each."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from beheld.checkpoint.files import read_json
from beheld.core.config import ModelInfo
from beheld.inputs.media.effective_size import Look

# Settings of an item that change its features in families that look at its neighbours.
ALONE = "alone"
AMONG_OTHERS = "among others"
BESIDE = "beside another kind"

PLAIN_LAYOUT = frozenset(("image_grid_thw", "video_grid_thw", "second_per_grid_ts", "image_sizes"))
PLAIN_HOST_ONLY = frozenset(("second_per_grid_ts", "video_metadata", "num_patches"))


_TEMPLATES = Path(__file__).parents[1] / "chat_templates"


@dataclass(frozen=True)
class Place:
    """Where an item stands among the pieces of a prompt."""

    modality: str


# Why embeddings cannot stand for an item.
LAID_OUT = "the prompt says how {modality} is laid out or when it was, which embeddings do not tell"

# (processor, modality, the item, keyword arguments of the sub-processor, setting) -> (its outputs, replacement text, or
# its ids where the tokenizer cannot make them of a text).
Call = Callable[[Any, str, Any, Mapping[str, Any], str], tuple[Mapping[str, Any], str | tuple[int, ...]]]
# (text of a prompt, modality -> number of its items) -> text with one marker for each item, or its pieces, of which the
# tokenizer is given one after the other.
Rewrite = Callable[[str, Mapping[str, int]], str | tuple[str | Place, ...]]


@dataclass(frozen=True)
class Family:
    """What the processor's own interface does not tell.

    Attributes:
        markers: modality -> the text that stands for an item where the chat template leaves that to the caller; the
            bare placeholder token if absent.
        template: the file in inputs/chat_templates, without its ending, for checkpoints that bring no chat template;
            empty if there is no agreed form.
        counts: modalities whose items look different when they are alone in a prompt.
        layout: outputs of the processor that positions need.
        host_only: outputs of the processor that the model's towers do not take.
        call: runs the processor on one item; None for the usual way.
        places: modality -> the token that an item replaces in a prompt, where its embeddings take another one.
        embedded_as: modality -> the modality whose placeholder its embeddings take, where it has none of its own.
        numbered: modalities whose items look different by their number in the prompt.
        beside: modality -> the other modality next to whose items, anywhere in a prompt, its own look different.
        rewrite: what the processor makes of a prompt's text before it is encoded, given the items by modality.
        rewrite_chat: what it makes of a rendered conversation; None leaves that as the template wrote it. What users
            wrote there must not become a marker by it.
        rewritten_ends: how the tokenizer's own ends go with a rewritten text; pieces get none.
        begins: what the processor lets every text begin with: "as written", or "with bos or eos" (the tokenizer's token
            for a text's beginning, or for its end if there is none).
        unbuilt: processor options that mean something which is not built -> what to do instead.
        named_here: options by the names that the repository's own code has for them -> how to say it here.
        load: makes the processor of the checkpoint in a folder, where transformers does not know it by itself.
        read_tokenizer: makes the tokenizer of a folder, where transformers does not know it by its name; gives None
            where it does.
        pieces: ordinary pieces of the vocabulary that steer the model as special tokens do.
        added: special tokens that the processor adds to its tokenizer, in this order, where they are missing.
        closes: why the last message of a conversation cannot be continued, as a half sentence: what the processor puts
            behind it. Empty if it can.
        most: modality -> the most items that the processor can place in one prompt, where it has a limit.
        embedded: modality -> what is written before and behind embeddings that are given in an item's place, with
            "{setting}" for the item's; or the reason, as a half sentence, why they cannot be given. Nothing is written
            if it is absent.
        looks: modality -> how large an item stands before the tower, where the processor's outputs do not say it in one
            of the common forms (inputs/sight.py).
        frame_rate: of frames whose times nobody told, where the processor would sample them by their times: the frames
            per second that they are taken to have, by the processor's part for videos; or the reason, as a half
            sentence, why they cannot be taken; or "", which leaves it to the processor.
    """

    markers: Mapping[str, str] = field(default_factory=dict)
    template: str = ""
    counts: frozenset[str] = frozenset()
    layout: frozenset[str] = PLAIN_LAYOUT
    host_only: frozenset[str] = PLAIN_HOST_ONLY
    call: Call | None = None
    places: Mapping[str, str] = field(default_factory=dict)
    embedded_as: Mapping[str, str] = field(default_factory=dict)
    numbered: frozenset[str] = frozenset()
    beside: Mapping[str, str] = field(default_factory=dict)
    rewrite: Rewrite | None = None
    rewrite_chat: Rewrite | None = None
    rewritten_ends: str = "added"
    begins: str = "as written"
    unbuilt: Mapping[str, str] = field(default_factory=dict)
    named_here: Mapping[str, str] = field(default_factory=dict)
    load: Callable[[Path], Any] | None = None
    read_tokenizer: Callable[[Path], Any | None] | None = None
    pieces: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    closes: str = ""
    most: Mapping[str, int] = field(default_factory=dict)
    embedded: Mapping[str, tuple[str, str] | str] = field(default_factory=dict)
    looks: Mapping[str, Look] = field(default_factory=dict)
    frame_rate: Callable[[Any], float] | str = ""

    @property
    def template_path(self) -> Path | None:
        """The file of the family's own chat template."""
        return _TEMPLATES / f"{self.template}.jinja" if self.template else None

    @property
    def template_text(self) -> str:
        """The family's own chat template; "" if there is none."""
        path = self.template_path
        return path.read_text(encoding="utf-8") if path is not None else ""

    def begun(self, text: str, tokenizer: Any) -> str:
        """The text with what the processor lets it begin with; `tokenizer` is transformers' own."""
        if self.begins == "as written":
            return text
        token = tokenizer.bos_token or tokenizer.eos_token
        return text if text.startswith(token) else token + text

    def setting(self, modality: str, index: int, counts: Mapping[str, int]) -> str:
        """The setting of item `index` of its modality in a prompt with so many of each; "" where it does not matter."""
        if modality in self.numbered:
            return str(index)
        if modality in self.beside:
            return BESIDE if counts.get(self.beside[modality]) else ""
        if modality not in self.counts:
            return ""
        return ALONE if counts[modality] == 1 else AMONG_OTHERS


_FILES = {
    "aria": "aria",
    "aya_vision": "aya_vision",
    "blip-2": "blip_2",
    "chameleon": "chameleon",
    "cohere2_vision": "cohere2_vision",
    "ernie4_5_vl_moe": "ernie4_5_vl_moe",
    "florence2": "florence2",
    "fuyu": "fuyu",
    "gemma3": "gemma3",
    "gemma3n": "gemma3n",
    "gemma4": "gemma4",
    "glm46v": "glm4v",
    "glm4v": "glm4v",
    "glm4v_moe": "glm4v",
    "hunyuan_vl": "hunyuan_vl",
    "idefics3": "tiled",
    "internvl": "internvl",
    "lfm2_vl": "lfm2_vl",
    "llama4": "llama4",
    "llava": "llava",
    "llava_next": "llava_next",
    "llava_next_video": "llava_next_video",
    "llava_onevision": "llava_onevision",
    "mistral3": "mistral3",
    "mllama": "mllama",
    "molmo2": "molmo2",
    "paligemma": "paligemma",
    "phi4_multimodal": "phi4_multimodal",
    "qwen2_vl": "qwen2_vl",
    "qwen3_vl": "qwen3_vl",
    "qwen3_vl_moe": "qwen3_vl",
    "qwen2_5_omni_thinker": "qwen_omni",
    "qwen3_omni_moe_thinker": "qwen3_omni",
    "smolvlm": "smolvlm",
    "voxtral": "voxtral",
    "qwen2_5_vl": "qwen2_vl",
}


# Families whose model is another one's: by the processor that their files name, and by the architecture that users'
# overrides name.
_BY_PROCESSOR = {("llava", "MLlavaProcessor"): "mantis", ("llava", "PixtralProcessor"): "tiled"}
_BY_ARCHITECTURE = {"MantisForConditionalGeneration": "mantis"}
_NAMING_PROCESSORS = ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json")


def family_of(info: ModelInfo) -> Family:
    """The family of a checkpoint; the plain one if it needs no help."""
    named = [read_json(Path(info.path) / file).get("processor_class") for file in _NAMING_PROCESSORS]
    owners = [(info.model_type, owner) for owner in named]
    name = next((_BY_PROCESSOR[owner] for owner in owners if owner in _BY_PROCESSOR), None)
    name = name or _BY_ARCHITECTURE.get(info.architecture) or _FILES.get(info.model_type)
    if name is None:
        return Family()
    return _loaded(name)


def family_of_type(model_type: str) -> Family:
    """The family of a model type alone, without a checkpoint; the plain one if it needs no help."""
    name = _FILES.get(model_type)
    return Family() if name is None else _loaded(name)


def _loaded(name: str) -> Family:
    family: Family = importlib.import_module(f"beheld.inputs.families.{name}").FAMILY
    return family
