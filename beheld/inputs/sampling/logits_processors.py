"""Logits processors of the engine: functions for all requests, and classes that make one per request.

A class is instantiated once, without arguments or with (configuration, device, whether memory is pinned) as vLLM's are,
and has `new_req_logits_processor(params)`, which returns a function for a request, or None. Such a class may read
`SamplingParams.extra_args`.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from typing import Any

from beheld.core.config import EngineConfig
from beheld.core.errors import ConfigError, ParamsError
from beheld.core.logits_processors import FromPackage, LogitsProcessor, num_arguments
from beheld.core.params import SamplingParams
from beheld.utils.log import get_logger

logger = get_logger(__name__)


class EngineProcessors:
    """Load the entries of `LLM(logits_processors=[...])`: functions, classes, or class names ("module:Class").

    Raises:
        ConfigError: an entry is none of these, cannot be instantiated, or takes other arguments.
    """

    def __init__(self, given: Sequence[Any], config: EngineConfig) -> None:
        self._functions: list[LogitsProcessor] = []
        self._makers: list[Any] = []
        self._told = False
        for entry in given:
            entry = entry.target if isinstance(entry, FromPackage) else entry
            entry = _named(entry) if isinstance(entry, str) else entry
            if isinstance(entry, type):
                self._makers.append(_made(entry, config))
            elif callable(entry):
                try:
                    num_arguments(entry)
                except ParamsError as error:
                    raise ConfigError(str(error), param="logits_processors") from None
                self._functions.append(entry)
            else:
                raise ConfigError(
                    f"logits_processors holds {entry!r}.",
                    "Pass functions (output_ids, logits) -> logits, or classes with new_req_logits_processor.",
                    param="logits_processors",
                )

    @property
    def common(self) -> bool:
        """True if requests that bring none have the same."""
        return not self._makers

    @property
    def reads_extra_args(self) -> bool:
        """True if there are classes, which may read them."""
        return bool(self._makers)

    def of(self, params: SamplingParams) -> tuple[LogitsProcessor, ...]:
        """Return all processors of one request: the engine's, then its own.

        Raises:
            ParamsError: a class refuses the request, or its function takes other arguments.
        """
        if params.extra_args and not self.reads_extra_args and not self._told:
            self._told = True
            logger.warning(
                "extra_args (%s) of a request are not read: no class is loaded that does. LLM(logits_processors=[...]) "
                "and --logits-processors load one.",
                ", ".join(repr(name)[:64] for name in params.extra_args),
            )
        made = [self._for_request(maker, params) for maker in self._makers]
        return (*self._functions, *(one for one in made if one is not None), *(params.logits_processors or ()))

    def _for_request(self, maker: Any, params: SamplingParams) -> LogitsProcessor | None:
        try:
            function: LogitsProcessor | None = maker.new_req_logits_processor(params)
        except Exception as error:
            raise ParamsError(
                f"{type(maker).__name__} refuses this request: {error}", "Check extra_args.", param="extra_args"
            ) from error
        if function is not None and not callable(function):
            raise ParamsError(
                f"{type(maker).__name__}.new_req_logits_processor returned {function!r}.",
                "It must return a function or None.",
                param="logits_processors",
            )
        if function is not None:
            num_arguments(function)
        return function


def _named(name: str) -> Any:
    module, _, attribute = name.replace(":", ".").rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"The logits processor {name!r} cannot be loaded: {error}.",
            "Write it as module:Class.",
            param="logits_processors",
        ) from error


def _made(kind: type, config: EngineConfig) -> Any:
    if not callable(getattr(kind, "new_req_logits_processor", None)):
        raise ConfigError(
            f"{kind.__name__} has no new_req_logits_processor(params).",
            "Pass a class that makes a function per request, or a function.",
            param="logits_processors",
        )
    try:
        wants = [
            p
            for p in inspect.signature(kind).parameters.values()
            if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
    except ValueError:
        wants = []
    try:
        return kind(config, _device(config), False) if len(wants) == 3 else kind()
    except Exception as error:
        raise ConfigError(
            f"{kind.__name__} cannot be made: {error}", "Check its constructor.", param="logits_processors"
        ) from error


def _device(config: EngineConfig) -> Any:
    import torch

    return torch.device(config.device)
