"""Frame labels: they name the requests of a message outside of its body, in case the body cannot be read."""

from __future__ import annotations

import json

from beheld.engine.messages import (
    Abort,
    AddLoRA,
    Asleep,
    Events,
    LoRAAdded,
    LoRAsManaged,
    ManageLoRA,
    Message,
    Ping,
    Pong,
    Profile,
    Profiled,
    Reply,
    Sleep,
    Stop,
    Submit,
    Unread,
    WakeUp,
)
from beheld.wire.link import MAX_LABEL_BYTES

_encoded = json.JSONEncoder(separators=(",", ":")).encode


def label_of(message: Message | Reply) -> bytes:
    """The label of a message: its request ids and its number. If the ids do not fit, only the first ones."""
    ids: list[str] = []
    if isinstance(message, Submit):
        ids = [request.id for request in message.requests]
    elif isinstance(message, Abort):
        ids = list(message.request_ids)
    elif isinstance(message, Stop):
        ids = [message.request_id]
    elif isinstance(message, Events):
        ids = [event.request_id for event in message.events]
    numbered = (
        Ping | Pong | AddLoRA | LoRAAdded | ManageLoRA | LoRAsManaged | Sleep | WakeUp | Asleep | Profile | Profiled
    )
    number = message.number if isinstance(message, numbered) else None
    label = _encoded([number, *ids]).encode()
    while len(label) > MAX_LABEL_BYTES:
        # The server's ids are short; other callers' may have any length.
        ids = ids[: len(ids) // 2]
        label = _encoded([number, *ids]).encode()
    return label


def unread_of(label: bytes | None) -> Unread:
    """The contents of a label.

    Raises:
        ValueError: the label is missing or malformed.
    """
    if label is None:
        raise ValueError("there is no label")
    try:
        content = json.loads(label)
    except RecursionError as error:
        raise ValueError("this is not a label") from error
    if not isinstance(content, list) or not content:
        raise ValueError("this is not a label")
    number, *ids = content
    if not (number is None or type(number) is int) or not all(isinstance(name, str) for name in ids):
        raise ValueError("this is not a label")
    return Unread(tuple(ids), number)
