"""What went wrong with the hub, in words, and what to do about it."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from difflib import get_close_matches

from beheld.core.errors import ModelError
from beheld.families import registry

# What keeps the hub from being reached, in words.
_UNREACHED = (
    (socket.gaierror, "the hub's address cannot be found"),
    (ConnectionRefusedError, "the connection to the hub, or to a proxy before it, is refused"),
    (TimeoutError, "the hub does not answer in time"),
)
_ELSEWHERE = "give a local folder, or run `hf download {}` where there is a network"
_ANOTHER_FOLDER = "name another folder with HF_HOME or --download-dir"
_LOG_IN = "log in with `hf auth login`, or give the key in HF_TOKEN"


def explained(sentence: str, error: Exception, name: str) -> ModelError:
    """The error for what could not be done with the repository `name`; `sentence` says what, without its full stop."""
    reason, remedy = _reason(error, name)
    return ModelError(f"{sentence}: {reason}.", remedy)


def _reason(error: Exception, name: str) -> tuple[str, str]:
    from huggingface_hub import errors

    known = list(_causes(error))
    for each in known:
        if isinstance(each, errors.OfflineModeIsEnabled):
            return "HF_HUB_OFFLINE keeps the network off", f"Unset it, {_ELSEWHERE.format(name)}."
        if isinstance(each, errors.GatedRepoError):
            return "it is gated", f"Accept its terms on the hub's page of {name}; then {_LOG_IN}."
        if isinstance(each, errors.RepositoryNotFoundError):
            return "the hub has no repository of this name, or it is private", _spelling(name)
        if isinstance(each, errors.RevisionNotFoundError):
            return "the repository has no such revision", "Give a branch, a tag or a commit of it."
        if isinstance(each, errors.LocalTokenNotFoundError):
            return "it asks for a key, and there is none", f"To give one, {_LOG_IN}."
        if isinstance(each, OSError) and each.errno in (errno.ENOSPC, errno.EDQUOT):
            return "the disk is full", f"Make room, or {_ANOTHER_FOLDER}."
        if isinstance(each, PermissionError):
            return (
                f"{each.filename or 'the cache'!r} may not be written",
                f"Change its permissions, or {_ANOTHER_FOLDER}.",
            )
    for each in known:
        status = getattr(getattr(each, "response", None), "status_code", None)
        if isinstance(status, int):
            later = "Try again later." if status == 429 or status >= 500 else f"If it is private, {_LOG_IN}."
            return f"the hub answered {status}", later
    words = next((words for each in known for kind, words in _UNREACHED if isinstance(each, kind)), None)
    reason = words or f"the hub gives no usable answer ({type(known[-1]).__name__})"
    return reason, f"Check the network, {_ELSEWHERE.format(name)}."


def _spelling(name: str) -> str:
    near = get_close_matches(name, [short.repository for short in registry.short_names().values()], 1, 0.8)
    guess = f"Did you mean {near[0]!r}? " if near and near[0] != name else "Check the spelling. "
    return f"{guess}If it is private, {_LOG_IN}."


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and what led to it."""
    found: BaseException | None = error
    for _ in range(8):
        if found is None:
            return
        yield found
        found = found.__cause__ or found.__context__
