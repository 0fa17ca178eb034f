"""Which code reads a checkpoint: transformers' own classes, or what the repository brings."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from beheld.utils.log import get_logger

logger = get_logger(__name__)

Loaded = TypeVar("Loaded")


def own_first(load: Callable[[bool], Loaded], *, trusted: bool) -> Loaded:
    """What `load` makes by transformers' own classes; by the repository's code where those cannot, if it is trusted.

    transformers itself takes the repository's code wherever it is trusted. Repositories keep the code that they were
    published with after transformers has learned their model, and what is checked here are transformers' classes.

    Args:
        load: given whether the repository's code may run; raises whatever transformers does.
        trusted: whether the user trusts it (trust_remote_code).
    """
    try:
        return load(False)
    except Exception as error:
        if not trusted:
            raise
        logger.debug("transformers' own classes cannot read this: %r; its repository's code may.", error)
        return load(True)
