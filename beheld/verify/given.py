"""What transformers' own processor makes of a question.

Images come from their files; frames of videos and samples of audio are read before, see decoding.py.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from beheld.checkpoint.code import own_first
from beheld.core.config import EngineArgs, MediaLimits, ModelInfo
from beheld.families import registry
from beheld.families.inputs import FamilyInputs
from beheld.inputs.media import audio, processor_options
from beheld.inputs.prompt.tokenizer import load_tokenizer
from beheld.verify.trace import Question, Trace

# The bounds of an image's pixels -> what they are called in a processor's size.
_BOUNDS = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}


class Processor:
    """The checkpoint's processor as transformers loads it, or the tokenizer of a model that takes text alone."""

    def __init__(self, info: ModelInfo, args: EngineArgs) -> None:
        self._info = info
        self._family: FamilyInputs = registry.inputs(info.family)
        self._asking = registry.facts(info.family).reference
        self._options = dict(args.mm_processor_kwargs or {})
        self._parts = _load(info, args, self._family)
        self._tokenizer = getattr(self._parts, "tokenizer", self._parts)
        if self._tokenizer.pad_token is None:
            # Some processors ask for padding also of a lone text.
            self._tokenizer.pad_token = self._tokenizer.convert_ids_to_tokens(0)

    def inputs(self, question: Question, made: Trace) -> dict[str, Any]:
        """The model's inputs, by the processor in one call; what it renders goes into `made`."""
        text, ends = self._text(question, made)
        if self._family.join_audio is not None:
            return self._family.join_audio(self._parts, text, self._waves(question))
        if self._asking.lists_images and not question.images:
            return dict(self._tokenizer([text], return_tensors="pt", **ends))
        told = self._told(question)
        return dict(self._parts(text=[text], return_tensors="pt", **self._media(question), **told, **ends))

    def items(self, question: Question) -> list[tuple[str, dict[str, Any]]]:
        """The kind of each image and video, in the order of the prompt, and the inputs of a prompt of it alone."""
        text, _ = self._text(question, Trace())
        marks = {getattr(self._parts, f"{kind}_token"): kind for kind in ("image", "video")}
        left = {kind: iter(items) for kind, items in question.media.items()}
        found = []
        for mark in re.findall("|".join(map(re.escape, marks)), text):
            kind = marks[mark]
            alone: dict[str, Any] = {"images": (), "videos": (), "sounds": (), f"{kind}s": (next(left[kind]),)}
            one = replace(question, text=mark, templated="plain", **alone)
            found.append((kind, self.inputs(one, Trace())))
        return found

    def _text(self, question: Question, made: Trace) -> tuple[str, dict[str, Any]]:
        """The prompt as the processor is given it, and whether it puts the tokenizer's ends around it."""
        text, ends = question.text, {}
        if question.templated == "chat":
            text = self._rendered(question, made)
            # A processor adds the tokenizer's ends unless the template wrote the first of them; a tokenizer never does.
            bos = getattr(self._tokenizer, "bos_token", None)
            if not self._info.modalities or (bos and text.startswith(bos)):
                ends = {"add_special_tokens": False}
        return self._with_markers(text, question), ends

    def _told(self, question: Question) -> dict[str, Any]:
        """The user's options, each bound of a size with the other one beside it.

        In older versions of transformers, Qwen2-VL's processor minds one of min_pixels and max_pixels only where it is
        given the other, too.
        """
        told = {name: value for name, value in self._options.items() if name not in _BOUNDS}
        for kind in {"image", "video"} & question.media.keys():
            group = {**told.get(processor_options.GROUPS[kind], {})}
            given = {name: self._options[name] for name in _BOUNDS if name in self._options} | group
            if not given.keys() & _BOUNDS.keys():
                continue
            size = getattr(processor_options.part_of(self._parts, kind), "size", None) or {}
            own = {name: size.get(edge) for name, edge in _BOUNDS.items()}
            told[processor_options.GROUPS[kind]] = {
                name: value for name, value in own.items() if value is not None
            } | given
        return told

    def _rendered(self, question: Question, made: Trace) -> str:
        # Some templates ask for the item itself, none for what it is.
        parts = [{"type": kind, kind: "given"} for kind, items in question.media.items() for _ in items]
        content = [*parts, {"type": "text", "text": question.text}] if parts else question.text
        messages = [{"role": "user", "content": content}]
        options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": True}
        if getattr(self._parts, "chat_template", None):
            text: str = self._parts.apply_chat_template(messages, **options)
        else:
            # Some processors do not look where older checkpoints keep the template, and some checkpoints bring none.
            template = self._tokenizer.chat_template or self._family.template_text or None
            text = self._tokenizer.apply_chat_template(messages, chat_template=template, **options)
        if self._tokenizer.chat_template or getattr(self._parts, "chat_template", None):
            made.rendered = self._family.begun(text, self._tokenizer)
        return text

    def _media(self, question: Question) -> dict[str, Any]:
        """The call's arguments for media."""
        given: dict[str, Any] = {}
        if question.images:
            # One inner list to a prompt, as apply_chat_template has it.
            found = pictures(question)
            given["images"] = found if self._asking.lists_images else [found]
        if question.videos:
            clips = [frames for frames, _ in question.videos]
            given["videos"] = [clips] if self._asking.nests_videos else clips
            known = [metadata for _, metadata in question.videos]
            if all(known):
                # The frames are chosen; some processors would choose among them again.
                given |= {"video_metadata": known, "do_sample_frames": False}
                if self._asking.wants_frame_rate:
                    given["fps"] = known[0]["fps"] * len(known[0]["frames_indices"]) / known[0]["total_num_frames"]
        if question.sounds:
            given |= {"audio": self._waves(question), "audio_kwargs": {"sampling_rate": self._rate}}
        return given

    @property
    def _rate(self) -> int:
        extractor = getattr(self._parts, "feature_extractor", None) or self._parts.audio_processor
        return int(extractor.sampling_rate)

    def _waves(self, question: Question) -> list[Any]:
        limits = MediaLimits()
        return [
            audio.resampled(audio.from_array(samples, rate, limits), self._rate).samples
            for samples, rate in question.sounds
        ]

    def _with_markers(self, text: str, question: Question) -> str:
        """The text with placeholders that transformers' processor reads, where the published code reads others."""
        marks = {
            kind: self._tokenizer.convert_ids_to_tokens(index) for kind, index in self._info.placeholder_ids.items()
        }
        around = self._family.embedded.get("image")
        if "image" in self._family.numbered and isinstance(around, tuple):
            first, *rest = text.split(marks["image"])
            numbered = [
                around[0].format(setting=number) + marks["image"] + around[1] + part
                for number, part in enumerate(rest, 1)
            ]
            return first + "".join(numbered)
        if not self._asking.rewrites or self._family.rewrite is None:
            return text
        written = self._family.rewrite(text, {kind: len(items) for kind, items in question.media.items()})
        pieces = (written,) if isinstance(written, str) else written
        return "".join(piece if isinstance(piece, str) else marks[piece.modality] for piece in pieces)


def pictures(question: Question) -> list[Any]:
    """The question's images as transformers is given them: upright, RGB."""
    from PIL import Image, ImageOps

    opened = [image if isinstance(image, Image.Image) else Image.open(image) for image in question.images]
    return [ImageOps.exif_transpose(image).convert("RGB") for image in opened]


def _load(info: ModelInfo, args: EngineArgs, family: FamilyInputs) -> Any:
    from transformers import AutoProcessor

    if not info.modalities:
        return load_tokenizer(info, args)
    if family.load is not None:
        parts = family.load(Path(info.path))
    else:
        # As the engine does, or the two would be asked by different code.
        parts = own_first(
            lambda trust: AutoProcessor.from_pretrained(info.path, trust_remote_code=trust),
            trusted=args.trust_remote_code,
        )
    if args.tokenizer is not None:
        parts.tokenizer = load_tokenizer(info, args)
    return parts
