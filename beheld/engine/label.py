"""What is written on a frame outside its body: whom the message concerns, should the body not be readable."""

from __future__ import annotations

import json

from beheld.engine.messages import Abort, AddLoRA, Events, LoRAAdded, Message, Ping, Pong, Reply, Stop, Submit, Unread
from beheld.sandbox.link import MAX_LABEL_BYTES

_encoded = json.JSONEncoder(separators=(",", ":")).encode


def label_of(message: Message | Reply) -> bytes:
    """The requests and the number that a message is about; of more requests than a label holds, the first."""
    ids: list[str] = []
    if isinstance(message, Submit):
        ids = [request.id for request in message.requests]
    elif isinstance(message, Abort):
        ids = list(message.request_ids)
    elif isinstance(message, Stop):
        ids = [message.request_id]
    elif isinstance(message, Events):
        ids = [event.request_id for event in message.events]
    number = message.number if isinstance(message, Ping | Pong | AddLoRA | LoRAAdded) else None
    label = _encoded([number, *ids]).encode()
    while len(label) > MAX_LABEL_BYTES:
        # Ids of the server are short; those of other users may be of any length.
        ids = ids[: len(ids) // 2]
        label = _encoded([number, *ids]).encode()
    return label


def unread_of(label: bytes | None) -> Unread:
    """What a label says.

    Raises:
        ValueError: there is none, or it is not one.
    """
    if label is None:
        raise ValueError("there is no label")
    try:
        said = json.loads(label)
    except RecursionError as error:
        raise ValueError("this is not a label") from error
    if not isinstance(said, list) or not said:
        raise ValueError("this is not a label")
    number, *ids = said
    if not (number is None or type(number) is int) or not all(isinstance(name, str) for name in ids):
        raise ValueError("this is not a label")
    return Unread(tuple(ids), number)
