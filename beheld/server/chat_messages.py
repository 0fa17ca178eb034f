"""Messages of a request as the input pipeline takes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from beheld.core.media import AUDIO_IN_VIDEO
from beheld.core.value_checks import nearest
from beheld.server import limits
from beheld.server.errors import HttpError
from beheld.server.options import ServerOptions
from beheld.server.parts_schema import RefusalPart, TextPart, ThinkingPart
from beheld.server.pooling_schema import ScoredContent
from beheld.server.schema import Message
from beheld.utils.part_fields import PartFields

_NO_FIELDS = PartFields()


def turned(given: list[Message], options: ServerOptions, fields: PartFields) -> list[dict[str, Any]]:
    """The messages as the input pipeline takes them, of which the list then has none; see `message_of`.

    They go one by one: to free tens of thousands of parts in one step keeps the interpreter for 40 ms.
    """
    left = given[::-1]
    given.clear()
    made: list[dict[str, Any]] = []
    while left:
        made.append(message_of(left.pop(), len(made), options, fields))
    return made


def message_of(
    message: Message | ScoredContent, number: int, options: ServerOptions, fields: PartFields = _NO_FIELDS
) -> dict[str, Any]:
    """The message as the input pipeline takes it.

    Args:
        message: as the request has it.
        number: its place, from 0.
        options: the server's options.
        fields: what the chat template reads of parts; what it does not is an option of the processor.

    Raises:
        HttpError: a part has a field that is neither, too many of them, or an option from a client that is not trusted.
    """
    # Templates read the content of every message, even of one with only tool calls.
    made = {"content": "", **message.model_dump(exclude_none=True)}
    refusal = made.pop("refusal", None)
    if refusal and message.content:
        raise HttpError(400, "A message has both content and a refusal.", "Leave one of them out.", param="messages")
    if refusal:
        # A refusal is the assistant's text; templates have no other field for it.
        made["content"] = refusal
    if not isinstance(message.content, list) or not isinstance(made["content"], list):
        return made
    reasoning: list[str] = []
    for place, (part, plain) in enumerate(zip(message.content, made["content"], strict=True)):
        if isinstance(part, RefusalPart):
            plain["type"], plain["text"] = "text", plain.pop("refusal")
            continue
        if isinstance(part, ThinkingPart):
            reasoning.append(part.thinking)
            continue
        is_text = isinstance(part, TextPart)
        own = () if is_text else AUDIO_IN_VIDEO
        extra = part.model_extra or {}
        if len(extra) > limits.MAX_PART_FIELDS:
            raise HttpError(
                400,
                f"The part has {len(extra)} further fields; at most {limits.MAX_PART_FIELDS} are allowed.",
                "Leave out those that nothing reads.",
                param=f"messages.{number}.content.{place}",
            )
        name = next((name for name in extra if name not in own and not fields.reads(name)), None)
        if name is not None and (is_text or not options.trust_processor_options):
            trust = "If it is a processor option, the operator may start the server with --trust-request-mm-kwargs."
            raise HttpError(
                400,
                f"The field {name[:64]!r} is unknown.",
                nearest(name, type(part).model_fields, 0.6) or "Leave it out." if is_text else trust,
                param=f"messages.{number}.content.{place}.{name}"[: limits.MAX_NAME],
                code="unknown_field",
            )
        source = plain.get(plain["type"])
        if isinstance(source, str) and plain["type"].endswith("_url"):
            plain[plain["type"]] = {"url": source}
    if reasoning:
        _put_reasoning(made, "".join(reasoning), number)
    return made


def _put_reasoning(made: dict[str, Any], text: str, number: int) -> None:
    """Put the reasoning in an assistant's parts where templates look for it.

    Raises:
        HttpError: the message is not the assistant's, or holds its reasoning twice.
    """
    if made.get("role") != "assistant" or made.get("reasoning") or made.get("reasoning_content"):
        raise HttpError(
            400,
            "Reasoning stands in a part of another's message, or twice in one.",
            "Send it once, as a thinking part or as reasoning of the assistant.",
            param=f"messages.{number}.content",
        )
    made["reasoning_content"] = text
    made["content"] = [part for part in made["content"] if part["type"] != "thinking"] or ""


# Modality -> options of reading a file that a request may set.
_READING = {"video": ("num_frames", "fps"), "image": ("rgba_background_color",)}
_READ = {
    "video": frozenset(("video", "video_url", "input_video")),
    "image": frozenset(("image", "image_url", "image_pil", "input_image")),
}


def read_as(
    messages: list[dict[str, Any]], given: Mapping[Any, Mapping[str, Any]] | None, options: ServerOptions
) -> None:
    """Have the videos and images of messages read with the request's options, where a part has none of its own.

    Raises:
        HttpError: the client is not trusted with options, or there is no such option.
    """
    if given is None or not any(given.values()):
        return
    if not options.trust_processor_options:
        raise HttpError(
            400,
            "This server does not accept options of reading media in requests.",
            "The operator may start it with --trust-request-mm-kwargs.",
            param="media_io_kwargs",
        )
    for modality, own in given.items():
        for name in own:
            if name not in _READING.get(modality, ()):
                raise HttpError(
                    400,
                    f"media_io_kwargs sets {name[:64]!r} for {modality}, which has no such option.",
                    "Set num_frames or fps for video, rgba_background_color for image, or leave it out.",
                    param="media_io_kwargs",
                )
    for message in messages:
        for part in message["content"] if isinstance(message["content"], list) else ():
            for modality, kinds in _READ.items():
                if part["type"] in kinds and not part.keys() & set(_READING[modality]):
                    part.update(given.get(modality, {}))
