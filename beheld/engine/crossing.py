"""The forms in which messages and replies cross a connection between processes."""

from __future__ import annotations

from dataclasses import replace

from beheld.engine.columns import EventColumns, columns_of, events_of
from beheld.engine.label import label_of, unread_of
from beheld.engine.messages import Events, Message, Pong, Reply, Submit, Unread
from beheld.utils.log import get_logger
from beheld.wire.link import FrameError, Link, NoRoomError
from beheld.wire.stream_link import StreamLink

logger = get_logger(__name__)


def sent_message(message: Message) -> Message:
    """The message without the fields that the engine ignores."""
    if not isinstance(message, Submit):
        return message
    return Submit(tuple(replace(request, receipts=(), prompt=None) for request in message.requests))


def sent_reply(reply: Reply, link: Link | StreamLink) -> Reply | EventColumns:
    """The reply with its events in columns, and with this side's unreadable frames counted."""
    if isinstance(reply, Events):
        return columns_of(reply)
    return _counted(reply, link) if isinstance(reply, Pong) else reply


def received_reply(reply: Reply | EventColumns, link: Link | StreamLink) -> Reply:
    """The reply that `sent_reply` made so."""
    if isinstance(reply, EventColumns):
        return events_of(reply)
    return _counted(reply, link) if isinstance(reply, Pong) else reply


def send_reply(reply: Reply, link: Link | StreamLink) -> Unread | None:
    """Send a reply. If there is no room for it, say which requests it was about, and return the same.

    Raises:
        OSError: the other side has ended.
    """
    label = label_of(reply)
    try:
        link.send(sent_reply(reply, link), label=label)
    except NoRoomError as error:
        lost = unread_of(label)
        logger.error("There is no room for a message about %d requests (%s).", len(lost.request_ids), error.strerror)
        link.send(lost)
        return lost
    return None


def _counted(pong: Pong, link: Link | StreamLink) -> Pong:
    return replace(pong, stats=replace(pong.stats, num_unread=pong.stats.num_unread + link.num_unread))


def unread_frame(error: FrameError) -> Unread | None:
    """The requests of an unreadable frame, from its label; without a label it is only logged."""
    try:
        concerned = unread_of(error.label)
    except ValueError:
        concerned = None
    cause = type(error.__cause__ or error).__name__
    if concerned is None:
        logger.error("A frame between the processes cannot be read and is dropped (%s).", cause)
    else:
        logger.error("A frame about %d requests cannot be read (%s).", len(concerned.request_ids), cause)
    return concerned
