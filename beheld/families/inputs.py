"""The second section of a family: what the processor's own interface does not tell of its prompts and media.

A folder's inputs.py holds INPUTS. Its functions may use what inputs/ offers; nothing of it needs a device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Settings of an item that change its features in families that look at its neighbours.
ALONE = "alone"
WITH_OTHERS = "among others"
WITH_OTHER_KIND = "with another kind"

PLAIN_LAYOUT = frozenset(("image_grid_thw", "video_grid_thw", "second_per_grid_ts", "image_sizes"))
PLAIN_HOST_ONLY = frozenset(("second_per_grid_ts", "video_metadata", "num_patches"))


Size = tuple[int, int]


@dataclass(frozen=True)
class EffectiveSize:
    """What stands before the tower.

    Attributes:
        width: of the whole image or frame in pixels, where it is largest; padding is not counted.
        height: the same.
        tiles: pieces that the tower is given, an overview of the whole included; 1 if it is not cut.
        frames: of a video; 0 of an image.
        step: the pixels to whose multiples the processor brings each side (merged patches, or tiles of a grid that it
            chooses by the image's shape); 0 where it brings every image to one shape, or keeps theirs.
    """

    width: int
    height: int
    tiles: int = 1
    frames: int = 0
    step: int = 0


@dataclass(frozen=True, eq=False)
class ProcessedItem:
    """An image or video and what its processor made of it.

    Attributes:
        size: of the image or of a frame as given, (width, height) in pixels.
        outputs: the processor's own, of this item alone.
        arguments: those that the sub-processor was called with.
        part: the sub-processor.
        whole: the processor that it belongs to, which has a say in some settings.
    """

    size: Size
    outputs: Mapping[str, Any]
    arguments: Mapping[str, Any]
    part: Any
    whole: Any = None

    def setting(self, name: str) -> Any:
        """An option of the call, or the sub-processor's own value, or the processor's; None if it has none."""
        found = (self.arguments.get(name), getattr(self.part, name, None), getattr(self.whole, name, None))
        return next((value for value in found if value is not None), None)

    def edge(self, name: str) -> int | None:
        """A setting that is a length, also where it is written as a height and a width that are equal."""
        value = self.setting(name)
        height = _entry(value, "height")
        if height is not None:
            return int(height) if height == _entry(value, "width") else None
        return int(value) if isinstance(value, int) else None


def _entry(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)


Look = Callable[[ProcessedItem], EffectiveSize | None]


@dataclass(frozen=True)
class ItemPlace:
    """Where an item stands among the pieces of a prompt."""

    modality: str


# Why embeddings cannot stand for an item.
LAID_OUT = "the prompt says how {modality} is laid out or when it was, which embeddings do not tell"

# (processor, modality, the item, keyword arguments of the sub-processor, setting) -> (its outputs, replacement text, or
# its ids where the tokenizer cannot make them of a text).
Call = Callable[[Any, str, Any, Mapping[str, Any], str], tuple[Mapping[str, Any], str | tuple[int, ...]]]
# (text of a prompt, modality -> number of its items) -> text with one placeholder for each item, or its pieces, which
# the tokenizer is given one after the other.
Rewrite = Callable[[str, Mapping[str, int]], str | tuple[str | ItemPlace, ...]]


@dataclass(frozen=True)
class FamilyInputs:
    """What the processor's own interface does not tell.

    Attributes:
        placeholders: modality -> the text that stands for an item where the chat template leaves that to the caller;
            the bare placeholder token if absent.
        template: the chat template for checkpoints that bring none, a file below families/; empty if there is no agreed
            form.
        counts: modalities whose items look different when they are alone in a prompt.
        layout: outputs of the processor that positions need.
        host_only: outputs of the processor that the model's towers do not take.
        call: runs the processor on one item; None for the usual way.
        places: modality -> the token that an item replaces in a prompt, where its embeddings take another one.
        embedded_as: modality -> the modality whose placeholder its embeddings take, where it has none of its own.
        numbered: modalities whose items look different by their number in the prompt.
        depends_on: modality -> the other modality next to whose items, anywhere in a prompt, its own look different.
        rewrite: what the processor makes of a prompt's text before it is encoded, given the items by modality.
        rewrite_chat: what it makes of a rendered conversation; None leaves that as the template wrote it. What users
            wrote there must not become a placeholder by it.
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
        join_audio: makes what transformers' model takes for a whole prompt of the processor, the prompt's text and the
            samples of its audio, where its own processor needs another library for that; `beheld verify` asks for it.
        frame_rate: of frames whose times nobody told, where the processor would sample them by their times: the frames
            per second that they are taken to have, by the processor's part for videos; or the reason, as a half
            sentence, why they cannot be taken; or "", which leaves it to the processor.
    """

    placeholders: Mapping[str, str] = field(default_factory=dict)
    template: str = ""
    counts: frozenset[str] = frozenset()
    layout: frozenset[str] = PLAIN_LAYOUT
    host_only: frozenset[str] = PLAIN_HOST_ONLY
    call: Call | None = None
    places: Mapping[str, str] = field(default_factory=dict)
    embedded_as: Mapping[str, str] = field(default_factory=dict)
    numbered: frozenset[str] = frozenset()
    depends_on: Mapping[str, str] = field(default_factory=dict)
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
    join_audio: Callable[[Any, str, Sequence[Any]], dict[str, Any]] | None = None

    @property
    def template_path(self) -> Path | None:
        """The file of the family's own chat template."""
        return Path(__file__).parent / self.template if self.template else None

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
        if modality in self.depends_on:
            return WITH_OTHER_KIND if counts.get(self.depends_on[modality]) else ""
        if modality not in self.counts:
            return ""
        return ALONE if counts[modality] == 1 else WITH_OTHERS
