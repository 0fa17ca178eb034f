"""MiniCPM-V: `(<image>./</image>)` and `(<video>./</video>)` in the text become slices between delimiters."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from beheld.checkpoint.files import CONFIG, read_json
from beheld.families.inputs import BySizes, EffectiveSize, FamilyInputs, ItemPlace, ProcessedItem
from beheld.inputs.media.effective_size import numbers

PLACEHOLDERS = {"image": "(<image>./</image>)", "video": "(<video>./</video>)"}
_MARKS = re.compile(r"\(<(image|video)>\./</\1>\)")


def load(path: Path) -> Any:
    """Make the processor of the checkpoint in `path`; see FamilyInputs.load."""
    from beheld.families.minicpmv.processing import MiniCPMVProcessor
    from beheld.families.minicpmv.processing import load as load_own

    return load_own(path, PLACEHOLDERS, MiniCPMVProcessor)


def call(
    processor: Any, modality: str, item: Any, options: Mapping[str, Any], setting: str
) -> tuple[Mapping[str, Any], str]:
    """Run the processor on one image, which the prompt numbers from 0, or on one video; see families.inputs.Call."""
    if modality == "image":
        made: tuple[Mapping[str, Any], str] = processor.image(item, int(setting) - 1, options)
        return made
    frames: tuple[Mapping[str, Any], str] = processor.video(item, options)
    return frames


def rewrite(text: str, counts: Mapping[str, int]) -> str | tuple[str | ItemPlace, ...]:
    """Return the pieces of a text with marks of images or videos; other text is unchanged."""
    return pieces_of(text, _MARKS)


def pieces_of(text: str, marks: re.Pattern[str], after: str = "") -> str | tuple[str | ItemPlace, ...]:
    """Return the pieces of a text around `marks`, whose first group is the modality; a text without marks unchanged.

    The first piece is text, if only an empty one: a tokenizer that begins texts begins that. `after` follows each item.
    """
    # The odd entries are the modalities.
    parts = marks.split(text)
    if len(parts) == 1:
        return text
    pieces: list[str | ItemPlace] = [parts[0]]
    for modality, following in zip(parts[1::2], parts[2::2], strict=True):
        pieces += [ItemPlace(modality), after + following]
    return (pieces[0], *(piece for piece in pieces[1:] if piece))


def variant(path: Path) -> FamilyInputs:
    """Return the inputs of the version in `path`; see FamilyInputs.variant."""
    from beheld.checkpoint.convert import read_here

    after = read_here(read_json(path / CONFIG)).facts.after  # type: ignore[union-attr]

    def own(text: str, counts: Mapping[str, int]) -> str | tuple[str | ItemPlace, ...]:
        return pieces_of(text, _MARKS, after)

    def own_chat(text: str, counts: Mapping[str, int]) -> str | tuple[str | ItemPlace, ...]:
        return own(text, counts) if any(counts.values()) else text

    return replace(INPUTS, rewrite=own, rewrite_chat=own_chat) if after else INPUTS


def rewrite_chat(text: str, counts: Mapping[str, int]) -> str | tuple[str | ItemPlace, ...]:
    """Return the pieces of a rendered conversation; without media, the marks are text."""
    return rewrite(text, counts) if any(counts.values()) else text


def sized(processor: Any, sizes: tuple[tuple[int, int], ...], setting: str) -> str:
    """Return the text that an image stands for; see BySizes."""
    part = processor.image_processor
    text: str = processor.words(part.grid(sizes[0], {}), int(setting) - 1 if part.use_image_id else None)
    return text


def sized_frames(processor: Any, sizes: tuple[tuple[int, int], ...], setting: str) -> str:
    """Return the text of a video whose frames are not cut; see BySizes."""
    text: str = processor.words(None, None) * len(sizes)
    return text


def look(item: ProcessedItem) -> EffectiveSize | None:
    """Return an image's effective size: its slices together, else the overview; see FamilyInputs.looks."""
    return item.part.seen(item.size, item.arguments)


def look_at_frames(item: ProcessedItem) -> EffectiveSize | None:
    """Return the effective size of a video's frames, which are not cut; see FamilyInputs.looks."""
    rows, columns = numbers(item.outputs["tgt_sizes"])[:2]
    patch = item.part.patch_size
    return EffectiveSize(columns * patch, rows * patch, frames=len(item.outputs["tgt_sizes"]), step=patch)


INPUTS = FamilyInputs(
    load=load,
    call=call,
    placeholders=PLACEHOLDERS,
    template="minicpmv/chat_template.jinja",
    rewrite=rewrite,
    rewrite_chat=rewrite_chat,
    rewritten_ends="first piece",
    variant=variant,
    # Embeddings of both use `<unk>`; tokens that begin an image and a slice keep their places apart until then.
    places={"image": "<image>", "video": "<slice>"},
    numbered=frozenset(("image",)),
    embedded={"image": BySizes(sized), "video": BySizes(sized_frames)},
    looks={"image": look, "video": look_at_frames},
)
