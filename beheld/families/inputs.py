"""The second section of a family: facts about its prompts and media that the processor's interface lacks.

A folder's inputs.py defines INPUTS. Its functions may use inputs/ and never need a device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from beheld.core.repetition import NoRepeatWindow, RepetitionDetectionParams
from beheld.core.sampling import TimestampRule
from beheld.core.speech import SpeechForm

# Settings of an item that change its features, in families where features depend on other items.
ALONE = "alone"
WITH_OTHERS = "among others"
WITH_OTHER_KIND = "with another kind"

PLAIN_LAYOUT = frozenset(("image_grid_thw", "video_grid_thw", "second_per_grid_ts", "image_sizes"))
PLAIN_HOST_ONLY = frozenset(("second_per_grid_ts", "video_metadata", "num_patches"))


Size = tuple[int, int]


@dataclass(frozen=True)
class EffectiveSize:
    """The effective size of an image or video: what the tower receives.

    Attributes:
        width: of the whole image or frame in pixels, at its largest; without padding.
        height: likewise.
        tiles: pieces that the tower receives, an overview of the whole included; 1 if the image is not cut.
        frames: of a video; 0 for an image.
        step: the processor resizes each side to a multiple of this many pixels (merged patches, or tiles of a grid that
            it chooses by the image's shape); 0 if it resizes every image to one shape, or keeps its shape.
    """

    width: int
    height: int
    tiles: int = 1
    frames: int = 0
    step: int = 0


@dataclass(frozen=True, eq=False)
class ProcessedItem:
    """An image or video and the processor's result.

    Attributes:
        size: of the given image or frame, (width, height) in pixels.
        outputs: the processor's outputs for this item alone.
        arguments: the sub-processor's arguments.
        part: the sub-processor.
        whole: the processor that it belongs to, which also holds some settings.
    """

    size: Size
    outputs: Mapping[str, Any]
    arguments: Mapping[str, Any]
    part: Any
    whole: Any = None

    def setting(self, name: str) -> Any:
        """Return an option from the call, else from the sub-processor, else from the processor; None if absent."""
        found = (self.arguments.get(name), getattr(self.part, name, None), getattr(self.whole, name, None))
        return next((value for value in found if value is not None), None)

    def edge(self, name: str) -> int | None:
        """Return a setting that is a length, which may be given as an equal height and width."""
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
    """The place of an item among the pieces of a prompt."""

    modality: str


@dataclass(frozen=True)
class AnswerRules:
    """Rules on the tokens of one prompt's answer, in addition to those of every answer.

    Attributes:
        spared_from: the checkpoint's `suppress_tokens` from this id on may occur; None for none of them.
        timestamps: the rule of timestamps, if the answer has them.
    """

    spared_from: int | None = None
    timestamps: TimestampRule | None = None


# Why embeddings cannot replace an item.
LAID_OUT = "the prompt says how {modality} is laid out or when it was, which embeddings do not tell"

# (processor, modality, the item, keyword arguments of the sub-processor, setting) -> (its outputs, replacement text, or
# ids if the tokenizer cannot make them from a text).
Call = Callable[[Any, str, Any, Mapping[str, Any], str], tuple[Mapping[str, Any], str | tuple[int, ...]]]


@dataclass(frozen=True)
class BySizes:
    """The text that embeddings stand for follows from sizes in pixels, which go with them.

    Attributes:
        text: (processor, width and height of the image or of each frame of the video, its setting) -> the text.
    """

    text: Callable[[Any, tuple[tuple[int, int], ...], str], str]


@dataclass(frozen=True)
class ByCount:
    """The text that embeddings stand for follows from their number.

    Attributes:
        text: (processor, number of embeddings) -> the text.
    """

    text: Callable[[Any, int], str]


# (processor, layout of a video, number of its audio's embeddings) -> (text with a placeholder for each embedding of the
# two, in the order of time; what positions depend on, besides the layouts of the two).
Interleave = Callable[[Any, Mapping[str, tuple[Any, ...]], int], tuple[str, Mapping[str, tuple[Any, ...]]]]
# (processor, modality, a prompt's text) -> further features of each of its items of this modality, by name.
Words = Callable[[Any, str, str], Mapping[str, Any]]
# (text of a prompt, modality -> number of its items) -> text with one placeholder per item, or its pieces, which the
# tokenizer encodes one by one.
Rewrite = Callable[[str, Mapping[str, int]], str | tuple[str | ItemPlace, ...]]


@dataclass(frozen=True)
class FamilyInputs:
    """Facts that the processor's interface lacks.

    Attributes:
        placeholders: modality -> the text that represents an item if the chat template leaves it to the caller, with
            "{number}" for the item's number among those of its modality; the plain placeholder token if absent.
        template: the chat template for checkpoints without one, a file below families/; empty if there is no agreed
            form.
        only_template: the family's template is used even if the checkpoint has one, because the model was trained with
            words that its processor writes.
        counts: modalities whose items are processed differently when alone in a prompt.
        few: modality in `counts` -> the most items in a prompt that are still processed as a lone one is; 1 if absent.
        layout: processor outputs that positions depend on.
        host_only: processor outputs that the model's towers do not take.
        exact: processor outputs that stay as they are whatever the model's type; see FamilyModel.exact_features.
        call: runs the processor on one item; None for the default.
        places: modality -> the token that an item replaces in a prompt, or several tokens in a row, the first of which
            is not among the others; if its embeddings use another placeholder.
        embeds_all: modalities whose embeddings replace all ids of an item, also those around the placeholders.
        embedded_as: modality -> the modality whose placeholder its embeddings use, if it has none.
        numbered: modalities whose items depend on their number in the prompt.
        reads_prompt: for towers that read an item together with its prompt's words: returns what the words add to the
            item's features. Such an item is encoded, and shared, with the same words only.
        depends_on: modality -> the other modality whose presence in a prompt changes its items.
        rewrite: what the processor does to a prompt's text before it is encoded, given the number of items by modality.
        rewrite_chat: what it does to a rendered conversation; None leaves the template's output unchanged. It must not
            turn text that users wrote into a placeholder.
        rewritten_ends: how the tokenizer's special tokens combine with a rewritten text: "added", or "written" if the
            text has them. Pieces get none, except with "each piece": every piece gets them as a text of its own; or
            with "first piece": the first does, for tokenizers that only begin texts.
        variant: returns the inputs of the checkpoint in a folder, if its prompts have another form than the family's
            usual: their template, or how they are rewritten.
        begins: how the processor begins every text: "as written", or "with bos or eos" (the tokenizer's BOS token, or
            EOS if it has no BOS).
        interleave: for models that read a video and its audio as one item: returns its text. Tensors of both are its
            features, and "audio_places" says which of its embeddings are the audio's. See FamilyModel.parts.
        unbuilt: unsupported processor options -> what to do instead.
        named_here: options by their names in the repository's code -> how to write them here.
        load: makes the processor of the checkpoint in a folder, if transformers cannot.
        read_tokenizer: makes the tokenizer of a folder, if transformers does not know it by name; returns None if it
            does.
        pieces: ordinary vocabulary pieces that control the model as special tokens do.
        added: special tokens that the processor adds to its tokenizer, in this order, if they are missing.
        closes: why a conversation's last message cannot be continued, as a half sentence: what the processor appends.
            Empty if it can.
        barred: tokens that no prompt with media may have -> why not, as a half sentence.
        most: modality -> the largest number of items in one prompt, if the processor has a limit.
        embedded: modality -> text before and after embeddings that replace an item, with "{setting}" for the item's
            setting; or what makes the whole text, BySizes or ByCount; or the reason, as a half sentence, why embeddings
            cannot replace it. Absent: no text.
        looks: modality -> a function that returns an item's effective size, if the processor's outputs do not have it
            in a common form (inputs/media/effective_size.py).
        repetition: when to end an answer that only repeats itself, for families whose cards advise it; a request's own
            `repetition_detection` takes precedence.
        no_repeat: which repetitions an answer does not write, for families whose cards advise it; a request's own
            `repetition_detection` or `ngram_size` takes its place.
        rules: returns the rules for the answer to a prompt, from its ids and the content of generation_config.json.
        states: for an encoder that reads one item: the number of its states, from the processor's outputs and the
            checkpoint's folder; None if it is always the same.
        answer_within_states: whether each position of the prompt and of its answer reads one state of the item, so that
            the answer ends with them.
        speech: how the model is asked for transcripts; None if nothing is known of it.
        join_audio: makes the model's inputs of a whole prompt from the processor, the prompt's text and its audio
            samples, if transformers' processor needs another library for it; for `beheld verify`.
        described_by: keys of a media part of a message that the chat template reads, as text; other keys are options of
            the processor.
        frame_rate: for frames without known times that the processor would sample by time: a function from the video
            processor to the assumed frames per second; or the reason, as a half sentence, why no rate can be assumed;
            or "", which leaves it to the processor.
    """

    placeholders: Mapping[str, str] = field(default_factory=dict)
    template: str = ""
    only_template: bool = False
    counts: frozenset[str] = frozenset()
    few: Mapping[str, int] = field(default_factory=dict)
    layout: frozenset[str] = PLAIN_LAYOUT
    host_only: frozenset[str] = PLAIN_HOST_ONLY
    exact: frozenset[str] = frozenset()
    call: Call | None = None
    places: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    embeds_all: frozenset[str] = frozenset()
    embedded_as: Mapping[str, str] = field(default_factory=dict)
    numbered: frozenset[str] = frozenset()
    depends_on: Mapping[str, str] = field(default_factory=dict)
    reads_prompt: Words | None = None
    rewrite: Rewrite | None = None
    rewrite_chat: Rewrite | None = None
    rewritten_ends: str = "added"
    variant: Callable[[Path], FamilyInputs] | None = None
    begins: str = "as written"
    interleave: Interleave | None = None
    unbuilt: Mapping[str, str] = field(default_factory=dict)
    named_here: Mapping[str, str] = field(default_factory=dict)
    load: Callable[[Path], Any] | None = None
    read_tokenizer: Callable[[Path], Any | None] | None = None
    pieces: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    closes: str = ""
    barred: Mapping[str, str] = field(default_factory=dict)
    most: Mapping[str, int] = field(default_factory=dict)
    embedded: Mapping[str, tuple[str, str] | BySizes | ByCount | str] = field(default_factory=dict)
    looks: Mapping[str, Look] = field(default_factory=dict)
    described_by: frozenset[str] = frozenset()
    frame_rate: Callable[[Any], float] | str = ""
    join_audio: Callable[[Any, str, Sequence[Any]], dict[str, Any]] | None = None
    repetition: RepetitionDetectionParams | None = None
    no_repeat: NoRepeatWindow | None = None
    rules: Callable[[Sequence[int], Mapping[str, Any]], AnswerRules] | None = None
    states: Callable[[Mapping[str, Any], Path], int] | None = None
    answer_within_states: bool = False
    speech: SpeechForm | None = None

    @property
    def template_path(self) -> Path | None:
        """Return the path of the family's chat template."""
        return Path(__file__).parent / self.template if self.template else None

    @property
    def template_text(self) -> str:
        """Return the family's chat template; "" if there is none."""
        path = self.template_path
        return path.read_text(encoding="utf-8") if path is not None else ""

    def placeholder(self, modality: str, number: int) -> str:
        """Return the text that represents an item, the number-th of its modality; "" for the plain placeholder."""
        return self.placeholders.get(modality, "").replace("{number}", str(number))

    def begun(self, text: str, tokenizer: Any) -> str:
        """Return the text with the processor's beginning; `tokenizer` is transformers'."""
        if self.begins == "as written":
            return text
        token = tokenizer.bos_token or tokenizer.eos_token
        return text if text.startswith(token) else token + text

    def setting(self, modality: str, index: int, counts: Mapping[str, int]) -> str:
        """Return the setting of item `index` of its modality, given the prompt's item counts; "" if it has none."""
        if modality in self.numbered:
            return str(index)
        if modality in self.depends_on:
            return WITH_OTHER_KIND if counts.get(self.depends_on[modality]) else ""
        if modality not in self.counts:
            return ""
        return ALONE if counts[modality] <= self.few.get(modality, 1) else WITH_OTHERS
