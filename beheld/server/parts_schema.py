"""Parts of a message: texts, media, files, embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
)

from beheld.server import limits
from beheld.server.body_schema import CACHED, Body, Name, Number, wrong
from beheld.server.notes import Notes


class TextPart(Body):
    """A text."""

    without_effect: ClassVar[Mapping[str, str]] = CACHED

    type: Literal["text", "input_text", "output_text"]
    text: str


class TalkedTextPart(TextPart):
    """A text of a conversation, with further entries that the chat template reads."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)


class RefusalPart(Body):
    """A text with which the assistant refused earlier."""

    type: Literal["refusal"]
    refusal: str


def _seen_in_full(detail: str, info: ValidationInfo) -> str:
    if detail == "low":
        if isinstance(info.context, Notes) and info.context.strict:
            raise wrong(
                "Images are always processed in the model's own resolution", "Send 'auto' or 'high', or leave it out."
            )
        if isinstance(info.context, Notes):
            info.context.tell("detail", "Images are always processed in the model's own resolution.")
    return detail


Detail = Annotated[Literal["auto", "high", "low", "original"], AfterValidator(_seen_in_full)]


Pages = Annotated[str, Field(max_length=limits.MAX_NAME)] | Annotated[int, Field(ge=1, lt=2**31)]


class Paged(Body):
    """What of a document is wanted: see the how-to page on documents."""

    pages: Pages | None = None
    dpi: Number | None = None
    text_layer: bool | Literal["only"] | None = None


class ImageUrl(Body):
    """An image's URL, or only the name under which it came before. `detail` has no effect: all pixels are read."""

    url: str | None = None
    detail: Detail | None = None
    uuid: Name | None = None


class MediaUrl(Body):
    """A URL, or only the name under which the item came before."""

    url: str | None = None
    uuid: Name | None = None


class ThinkingPart(Body):
    """A text that the assistant reasoned earlier."""

    without_effect: ClassVar[Mapping[str, str]] = {"closed": "Templates close it.", "signature": "Nothing is signed."}

    type: Literal["thinking"]
    thinking: str


class ImagePart(Paged):
    """An image, or a document whose pages are images."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)
    without_effect: ClassVar[Mapping[str, str]] = CACHED
    type: Literal["image_url"]
    image_url: ImageUrl | str | None = None
    uuid: Name | None = None


class _Sources(Body):
    """Where an item may stand in a part that is named after its modality, as in transformers' messages."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)
    without_effect: ClassVar[Mapping[str, str]] = CACHED
    url: str | None = None
    path: str | None = None
    base64: str | None = None
    data: str | None = None
    uuid: Name | None = None


class NamedImagePart(_Sources):
    """An image in a part of the type `image`; `image_pil`, which holds an object in Python, holds a URL."""

    type: Literal["image", "image_pil"]
    image: ImageUrl | str | None = None
    image_pil: str | None = None
    detail: Detail | None = None


class NamedVideoPart(_Sources):
    """A video in a part of the type `video`."""

    type: Literal["video"]
    video: MediaUrl | str | None = None


class NamedAudioPart(_Sources):
    """Audio in a part of the type `audio`."""

    type: Literal["audio"]
    audio: MediaUrl | str | None = None


class InputImagePart(Paged):
    """An image as in the Responses API."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)
    without_effect: ClassVar[Mapping[str, str]] = CACHED
    type: Literal["input_image"]
    image_url: ImageUrl | str | None = None
    detail: Detail | None = None
    uuid: Name | None = None


class InputVideoPart(Body):
    """A video, named as an image of the Responses API is."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)
    without_effect: ClassVar[Mapping[str, str]] = CACHED
    type: Literal["input_video"]
    video_url: MediaUrl | str | None = None
    uuid: Name | None = None


class FileContent(Body):
    """A file: its bytes in base64 or as a data URL, or its address."""

    remedies: ClassVar[Mapping[str, str]] = {"file_id": "Send its file_data; this server keeps no files."}
    says_nothing: ClassVar[Mapping[str, tuple[Any, ...]]] = {"file_id": ()}

    file_data: str | None = None
    file_url: str | None = None
    filename: Name | None = None


class FilePart(Paged):
    """A document, or media of any kind that the model takes."""

    without_effect: ClassVar[Mapping[str, str]] = CACHED

    type: Literal["file"]
    file: FileContent
    uuid: Name | None = None


class InputFilePart(Paged):
    """A file as in the Responses API."""

    remedies: ClassVar[Mapping[str, str]] = FileContent.remedies
    says_nothing: ClassVar[Mapping[str, tuple[Any, ...]]] = FileContent.says_nothing
    without_effect: ClassVar[Mapping[str, str]] = CACHED

    type: Literal["input_file"]
    file_data: str | None = None
    file_url: str | None = None
    filename: Name | None = None
    uuid: Name | None = None


class VideoPart(Body):
    """A video."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)
    without_effect: ClassVar[Mapping[str, str]] = CACHED
    type: Literal["video_url"]
    video_url: MediaUrl | str | None = None
    uuid: Name | None = None


class AudioPart(Body):
    """Audio by its URL."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)
    without_effect: ClassVar[Mapping[str, str]] = CACHED
    type: Literal["audio_url"]
    audio_url: MediaUrl | str | None = None
    uuid: Name | None = None


class InputAudio(Body):
    """The bytes of an audio clip."""

    data: str
    format: Literal["wav", "mp3", "flac", "ogg", "opus", "aac", "m4a", "mp4", "webm"] | None = None


class InputAudioPart(Body):
    """An audio clip within the request."""

    without_effect: ClassVar[Mapping[str, str]] = CACHED

    type: Literal["input_audio"]
    input_audio: InputAudio
    uuid: Name | None = None


class AudioEmbedsPart(Body):
    """An audio clip's embeddings, computed elsewhere."""

    without_effect: ClassVar[Mapping[str, str]] = CACHED

    type: Literal["audio_embeds"]
    audio_embeds: str | dict[str, str]
    uuid: Name | None = None


class VideoEmbedsPart(Body):
    """A video's embeddings, computed elsewhere."""

    without_effect: ClassVar[Mapping[str, str]] = CACHED

    type: Literal["video_embeds"]
    video_embeds: str | dict[str, str]
    uuid: Name | None = None


class EmbedsPart(Body):
    """An image's embeddings, computed elsewhere."""

    without_effect: ClassVar[Mapping[str, str]] = CACHED

    type: Literal["image_embeds"]
    image_embeds: str | dict[str, str]
    uuid: Name | None = None


class PromptEmbedsPart(Body):
    """Embeddings in place of a text, for models of text."""

    without_effect: ClassVar[Mapping[str, str]] = CACHED

    type: Literal["prompt_embeds"]
    data: str


# Of parts that hold one thing under the name of their type, which they may then leave out.
_TYPES_BY_KEY = frozenset(("text", "image_url", "video_url", "audio_url", "input_audio", "image", "video", "audio"))


_TYPES_BY_KEY |= {"image_embeds", "audio_embeds", "video_embeds"}


def _typed(given: Any) -> Any:
    """Return a part with the type that its one key says, if it names none."""
    if not isinstance(given, dict) or "type" in given:
        return given
    found = _TYPES_BY_KEY & given.keys()
    return {"type": next(iter(found)), **given} if len(found) == 1 else given


_OtherPart = (
    RefusalPart
    | ThinkingPart
    | ImagePart
    | NamedImagePart
    | InputImagePart
    | VideoPart
    | NamedVideoPart
    | InputVideoPart
    | NamedAudioPart
    | AudioPart
    | InputAudioPart
    | EmbedsPart
    | AudioEmbedsPart
    | VideoEmbedsPart
    | PromptEmbedsPart
    | FilePart
    | InputFilePart
)


# A part of a conversation, and one of what is asked about or compared, whose texts have nothing for a template.
Part = Annotated[TalkedTextPart | _OtherPart, Field(discriminator="type"), BeforeValidator(_typed)]
PlainPart = Annotated[TextPart | _OtherPart, Field(discriminator="type"), BeforeValidator(_typed)]


Parts = Annotated[list[Part], Field(max_length=limits.MAX_PARTS, fail_fast=True)]
PlainParts = Annotated[list[PlainPart], Field(max_length=limits.MAX_PARTS, fail_fast=True)]


# An assistant's earlier reasoning.
Reasoning = str | PromptEmbedsPart
