"""The reference's processor: transformers' processor applied to a question.

Images come from their files; video frames and audio samples are decoded before, see decoding.py.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from beheld.checkpoint.remote_code import own_first
from beheld.core.config import EngineArgs, MediaLimits, ModelInfo
from beheld.families import registry
from beheld.families.inputs import FamilyInputs
from beheld.inputs.media import audio, processor_options
from beheld.inputs.prompt.tokenizer import load_tokenizer
from beheld.tools.verify.trace import Question, Trace

# The pixel limits of an image -> their names in a processor's size.
_BOUNDS = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}


class Processor:
    """The checkpoint's processor as transformers loads it, or the tokenizer of a text-only model."""

    def __init__(self, info: ModelInfo, args: EngineArgs) -> None:
        self._info = info
        self._family: FamilyInputs = registry.inputs_of(info.family, Path(info.path))
        self._facts = registry.facts(info.family).reference
        self._options = dict(args.mm_processor_kwargs or {})
        self._parts = _load(info, args, self._family)
        self._tokenizer = getattr(self._parts, "tokenizer", self._parts)
        if self._tokenizer.pad_token is None:
            # Some processors require a padding token even for a single text.
            self._tokenizer.pad_token = self._tokenizer.convert_ids_to_tokens(0)

    def inputs(self, question: Question, made: Trace) -> dict[str, Any]:
        """Return the model's inputs from one processor call; the rendered prompt is recorded in `made`."""
        text, ends = self._text(question, made)
        if self._family.join_audio is not None:
            return self._family.join_audio(self._parts, text, self._waves(question))
        if self._facts.lists_images and not question.images:
            return dict(self._tokenizer([text], return_tensors="pt", **ends))
        options = self._processor_options(question)
        return dict(self._parts(text=[text], return_tensors="pt", **self._media(question), **options, **ends))

    def items(self, question: Question) -> list[tuple[str, dict[str, Any]]]:
        """Return the kind of each image and video in prompt order, and the inputs of a prompt of that item alone."""
        text, _ = self._text(question, Trace())
        placeholders = {getattr(self._parts, f"{kind}_token"): kind for kind in ("image", "video")}
        left = {kind: iter(items) for kind, items in question.media.items()}
        found = []
        for mark in re.findall("|".join(map(re.escape, placeholders)), text):
            kind = placeholders[mark]
            alone: dict[str, Any] = {"images": (), "videos": (), "audios": (), f"{kind}s": (next(left[kind]),)}
            one = replace(question, text=mark, templated="plain", **alone)
            found.append((kind, self.inputs(one, Trace())))
        return found

    def _text(self, question: Question, made: Trace) -> tuple[str, dict[str, Any]]:
        """Return the prompt for the processor, and whether the processor adds the tokenizer's special tokens."""
        text, ends = question.text, {}
        if question.templated == "chat":
            text = self._rendered(question, made)
            # A processor adds the tokenizer's special tokens unless the template wrote the first of them; a tokenizer
            # never does.
            bos = getattr(self._tokenizer, "bos_token", None)
            if not self._info.modalities or (bos and text.startswith(bos)):
                ends = {"add_special_tokens": False}
        return self._with_placeholders(text, question), ends

    def _processor_options(self, question: Question) -> dict[str, Any]:
        """Return the user's options, with both limits of a size whenever one is given.

        In older versions of transformers, Qwen2-VL's processor applies one of min_pixels and max_pixels only if both
        are given.
        """
        options = {name: value for name, value in self._options.items() if name not in _BOUNDS}
        for kind in {"image", "video"} & question.media.keys():
            group = {**options.get(processor_options.GROUPS[kind], {})}
            given = {name: self._options[name] for name in _BOUNDS if name in self._options} | group
            if not given.keys() & _BOUNDS.keys():
                continue
            size = getattr(processor_options.part_of(self._parts, kind), "size", None) or {}
            own = {name: size.get(edge) for name, edge in _BOUNDS.items()}
            options[processor_options.GROUPS[kind]] = {
                name: value for name, value in own.items() if value is not None
            } | given
        return options

    def _rendered(self, question: Question, made: Trace) -> str:
        # Some templates read the item, none its contents.
        media = [{"type": kind, kind: "given"} for kind, items in question.media.items() for _ in items]
        parts = [*media, {"type": "text", "text": question.text}]
        text = self._templated(parts if media else question.text)
        if question.text.strip() not in text and not media:
            # Templates of some models with media, such as LLaVA's, read a list of parts and drop a plain string.
            text = self._templated(parts)
        if self._tokenizer.chat_template or getattr(self._parts, "chat_template", None):
            made.rendered = self._family.begun(text, self._tokenizer)
        return text

    def _templated(self, content: str | list[dict[str, Any]]) -> str:
        """Return the prompt of a user's turn with `content`."""
        messages = [{"role": "user", "content": content}]
        options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": True}
        if getattr(self._parts, "chat_template", None):
            text: str = self._parts.apply_chat_template(messages, **options)
        else:
            # Some processors ignore where older checkpoints keep the template, and some checkpoints have none.
            template = self._tokenizer.chat_template or self._family.template_text or None
            text = self._tokenizer.apply_chat_template(messages, chat_template=template, **options)
        return text

    def _media(self, question: Question) -> dict[str, Any]:
        """Return the processor call's arguments for media."""
        given: dict[str, Any] = {}
        if question.images:
            # One inner list per prompt, as in apply_chat_template.
            opened = images(question)
            given["images"] = opened if self._facts.lists_images else [opened]
        if question.videos:
            clips = [frames for frames, _ in question.videos]
            given["videos"] = [clips] if self._facts.nests_videos else clips
            known = [metadata for _, metadata in question.videos]
            if all(known):
                # The frames are already sampled; some processors would sample them again.
                given |= {"video_metadata": known, "do_sample_frames": False}
                if self._facts.wants_frame_rate:
                    given["fps"] = known[0]["fps"] * len(known[0]["frames_indices"]) / known[0]["total_num_frames"]
        if question.audios:
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
            for samples, rate in question.audios
        ]

    def _with_placeholders(self, text: str, question: Question) -> str:
        """Replace the published code's placeholders by those that transformers' processor reads."""
        placeholders = {
            kind: self._tokenizer.convert_ids_to_tokens(index) for kind, index in self._info.placeholder_ids.items()
        }
        around = self._family.embedded.get("image")
        if "image" in self._family.numbered and isinstance(around, tuple):
            first, *rest = text.split(placeholders["image"])
            numbered = [
                around[0].format(setting=number) + placeholders["image"] + around[1] + part
                for number, part in enumerate(rest, 1)
            ]
            return first + "".join(numbered)
        if not self._facts.rewrites or self._family.rewrite is None:
            return text
        written = self._family.rewrite(text, {kind: len(items) for kind, items in question.media.items()})
        pieces = (written,) if isinstance(written, str) else written
        return "".join(piece if isinstance(piece, str) else placeholders[piece.modality] for piece in pieces)


def images(question: Question) -> list[Any]:
    """Return the question's images as transformers receives them: upright, RGB."""
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
        # As in the engine; otherwise the two sides would see different code.
        parts = own_first(
            lambda trust: AutoProcessor.from_pretrained(info.path, trust_remote_code=trust),
            trusted=args.trust_remote_code,
        )
    if args.tokenizer is not None:
        parts.tokenizer = load_tokenizer(info, args)
    return parts
