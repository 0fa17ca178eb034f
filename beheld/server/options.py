"""What a server was told: addresses, keys, limits and what it trusts its clients with."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any

from beheld.core.errors import ConfigError
from beheld.core.request import LoRARequest
from beheld.server import limits
from beheld.text.tools import READERS

REASONING_PARSERS = ("think",)


def _said(default: Any, flag: str, meaning: str, **more: Any) -> Any:
    """A field that the operator may set.

    Args:
        default: of the field.
        flag: of the command line, without dashes before it; the same word stands in a --config file.
        meaning: for --help and the documents; `shown` where the default needs words.
        more: `low`, `high`, `choices`: what is taken; `unit`: how much of the field one of the flag is; `many`: several
            values are taken; `metavar`.
    """
    return field(default=default, metadata={"flag": flag, "meaning": meaning, **more})


@dataclass(frozen=True)
class ServerOptions:
    """Options of the server, beside those of the engine. What an operator may set is told here and nowhere else: flags,
    files of options and the documents are made from it.

    Attributes:
        names: the model's names in requests; the first is the one it answers with.
        aliases: further names that requests may use, and that are not shown.
        max_answers: n of one request, and prompts of one request.
        max_tools: tools in one request.
        header_s: how long a client may take to send its headers.
        body_s, body_most_s: how long it may take to send its body: if hardly any of it comes, and at most (`paced`).
        send_s: how long a client may leave an answer unread.
        keep_alive_s: how long an idle connection is kept.
        health_s: how long the engine may take to answer /health.

    Raises:
        ConfigError: a value is out of range, or none at all.
    """

    host: str = _said("127.0.0.1", "host", "where it listens")
    port: int = _said(8000, "port", "0 takes a free one", low=0, high=65535)
    api_keys: tuple[str, ...] = _said(
        (),
        "api-key",
        "one or several; any of them opens every route; browsers may give it as a password. Different keys share no "
        "cached prefix",
        many=True,
        metavar="KEY",
        shown="none",
    )
    allowed_hosts: tuple[str, ...] = _said(
        (),
        "allowed-hosts",
        "further names under which a server may be asked that has no key and listens on this machine alone; addresses "
        "and names without a dot always may",
        many=True,
        metavar="NAME",
        shown="none",
    )
    loras: tuple[LoRARequest, ...] = _said(
        (),
        "lora-modules",
        "NAME=FOLDER...: LoRA adapters that requests may name as their model, with `--enable-lora`",
        many=True,
        metavar="NAME=FOLDER",
        shown="none",
    )
    max_body_bytes: int = _said(64 << 20, "max-body-mib", "largest request, in MiB", low=1, unit=1 << 20)
    max_reading_bytes: int = _said(
        1 << 30,
        "max-reading-mib",
        "what the bodies of requests may hold in all until their media are prepared; more are told to come back",
        low=1,
        unit=1 << 20,
    )
    max_requests: int = _said(
        1024, "max-concurrent-requests", "answers in work; more are told to come back before they are read", low=1
    )
    drain_s: float = _said(
        30.0,
        "drain-timeout",
        "seconds that running answers have after SIGTERM or Ctrl-C; a second signal ends at once",
        low=0.0,
        high=86400.0,
    )
    tool_parser: str | None = _said(
        None,
        "tool-call-parser",
        f"how the model writes tool calls: {', '.join(f'`{name}`' for name in READERS)}",
        choices=tuple(READERS),
        shown="from the chat template",
    )
    reasoning_parser: str | None = _said(
        None,
        "reasoning-parser",
        "`think`: what stands between `<think>` and `</think>` becomes `reasoning_content`",
        choices=REASONING_PARSERS,
        shown="none",
    )
    trust_templates: bool = _said(False, "trust-request-chat-template", "requests may bring a template", shown="off")
    trust_processor_options: bool = _said(
        False,
        "trust-request-mm-kwargs",
        "requests may set processor options, also in content parts; media are then processed where that can be killed",
        shown="off",
    )
    fair_shares: bool = _said(
        True,
        "no-fair-shares",
        "prompts are computed in the order of their arrival; else clients (keys if there are several, addresses "
        "otherwise) take turns",
        shown="",
    )
    show_page: bool = _said(True, "no-page", "no page at /", shown="")
    names: tuple[str, ...] = ("mote",)
    aliases: tuple[str, ...] = ()
    max_answers: int = limits.MAX_ANSWERS
    max_tools: int = limits.MAX_TOOLS
    header_s: float = 10.0
    body_s: float = 10.0
    body_most_s: float = 60.0
    send_s: float = 30.0
    keep_alive_s: float = 30.0
    health_s: float = 8.0

    def __post_init__(self) -> None:
        for one in fields(self):
            _check(one.metadata, getattr(self, one.name))
        if not self.host.strip():
            # The system would take it for all addresses.
            raise ConfigError("--host is empty.", "Name an address; 0.0.0.0 means all of them.", param="host")
        for key in self.api_keys:
            if not key or key != key.strip() or not key.isprintable():
                raise ConfigError(
                    "An API key is empty, or has blanks around it.", "Give each key as one word.", param="api_key"
                )
        if not all(self.names):
            raise ConfigError("A name of the model is empty.", "Leave it out.", param="served_model_name")
        if self.max_reading_bytes < self.max_body_bytes:
            raise ConfigError(
                "A body may be larger than all bodies together.",
                "Raise --max-reading-mib, or lower --max-body-mib.",
                param="max_reading_mib",
            )

    @property
    def max_connections(self) -> int:
        """How many connections are served."""
        return 4 * self.max_requests + 256


def _check(told: Any, value: Any) -> None:
    flag = told.get("flag")
    if flag is None or value is None:
        return
    unit = told.get("unit", 1)
    low, high = told.get("low", -math.inf) * unit, told.get("high", math.inf) * unit
    param = flag.replace("-", "_")
    if isinstance(value, int | float) and not low <= value <= high:
        span = f"at least {low / unit:g}" if high == math.inf else f"from {low / unit:g} to {high / unit:g}"
        raise ConfigError(f"--{flag} must be {span}, got {value / unit:g}.", "Choose another.", param=param)
    if "choices" in told and value not in told["choices"]:
        raise ConfigError(f"--{flag} knows no {value!r}.", f"Known: {', '.join(told['choices'])}.", param=param)
