"""Logits processors of installed packages, which vLLM loads by themselves: the entry points of a group of its own."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable
from typing import Any

from beheld.compat import finder
from beheld.core.errors import ConfigError
from beheld.core.logits_processors import FromPackage
from beheld.utils.log import get_logger

logger = get_logger(__name__)

GROUP = "vllm.logits_processors"


def with_installed(given: Iterable[Any] | None) -> list[Any] | None:
    """The installed processors, then those that are given; None if there are none.

    One that is given by its name too is there once. Their modules find beheld as `vllm`.

    Raises:
        ConfigError: a package's processor cannot be loaded.
    """
    named = list(given or ())
    points = [point for point in importlib.metadata.entry_points(group=GROUP) if point.value not in named]
    if not points:
        return named or None
    finder.install()
    loaded = [_loaded(point) for point in points]
    logger.info(
        "Logits processors of installed packages change answers: %s.",
        ", ".join(f"{point.name} ({point.value})" for point in points),
    )
    return [*loaded, *(entry for entry in named if not any(entry is known.target for known in loaded))]


def _loaded(point: Any) -> FromPackage:
    try:
        return FromPackage(point.load())
    except Exception as error:
        raise ConfigError(
            f"The logits processor {point.value!r} of an installed package (entry point {point.name!r} of {GROUP}) "
            f"cannot be loaded: {error}.",
            "Mend or uninstall the package: its processor would change answers.",
            param="logits_processors",
        ) from error
