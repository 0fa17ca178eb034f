"""The server's options: addresses, keys, limits and trust in clients."""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from beheld.api.front_place import FrontPlace
from beheld.core.errors import ConfigError
from beheld.core.request import LoRARequest
from beheld.server import limits
from beheld.text import reasoning
from beheld.text.tools import FORMATS

NONE = "none"


def _option(default: Any, flag: str, meaning: str, **more: Any) -> Any:
    """A field that the operator may set.

    Args:
        default: the field's default.
        flag: the command-line flag without dashes, also the key in a --config file.
        meaning: text for --help and the documentation; `shown` describes a default in words.
        more: `low`, `high`, `choices`: valid values; `plugin`: the field by which others are valid, too; `unit`: how
            much of the field one unit of the flag is; `many`: several values are accepted; `json`: the value is JSON;
            `metavar`.
    """
    return field(default=default, metadata={"flag": flag, "meaning": meaning, **more})


@dataclass(frozen=True)
class ServerOptions:
    """Options of the server in addition to those of the engine.

    This is the only definition of what an operator can set: command-line flags, option files and documentation are made
    from it.

    Attributes:
        names: the model's names in requests; responses use the first.
        root: the model's own name, where requests call it otherwise: its repository, or the last part of its path.
        aliases: further names that requests may use and that are not listed.
        max_answers: the most answers of one request: n times its prompts.
        max_tools: the most tools in one request.
        header_s: seconds for a client to send its headers.
        body_s, body_most_s: seconds for a client to send its body: if hardly any data arrives, and at most (see
            `paced`).
        send_s: seconds within which a client must read 64 KiB of a response that waits, or all of it.
        keep_alive_s: seconds that an idle connection is kept.
        tool_plugin, reasoning_plugin: the classes that plug-ins have for the parsers' names.
        health_s: seconds without a sign of the engine after which /health says that it hangs.

    Raises:
        ConfigError: a value is invalid or out of range.
    """

    host: str = _option("127.0.0.1", "host", "address to listen on")
    port: int = _option(8000, "port", "port to listen on; 0 takes a free one", low=0, high=65535)
    uds: str | None = _option(
        None, "uds", "path of a Unix socket to listen on, in place of an address", metavar="FILE", shown="none"
    )
    root_path: str = _option(
        "",
        "root-path",
        "what the addresses of requests begin with, if a proxy before the server does not take it off, such as "
        "`/models/vision`",
        shown="none",
    )
    ssl_certfile: str | None = _option(
        None, "ssl-certfile", "certificate in PEM: the server speaks TLS", metavar="FILE", shown="none"
    )
    ssl_keyfile: str | None = _option(
        None, "ssl-keyfile", "its private key, if it is in another file", metavar="FILE", shown="none"
    )
    ssl_ca_certs: str | None = _option(
        None, "ssl-ca-certs", "certificates of the authorities that clients' certificates are checked with",
        metavar="FILE", shown="none",
    )  # fmt: skip
    ssl_cert_reqs: int = _option(
        0, "ssl-cert-reqs", "whether clients show a certificate: 0 never, 1 if they have one, 2 always", low=0, high=2
    )
    ssl_ciphers: str | None = _option(
        None, "ssl-ciphers", "ciphers of TLS up to 1.2, as OpenSSL lists them", shown="OpenSSL's"
    )
    allowed_origins: tuple[str, ...] = _option(
        (),
        "allowed-origins",
        "origins of other sites' pages whose scripts may ask the server (CORS), such as `https://example.org`, or a "
        "JSON list; `*` for all",
        many=True,
        metavar="ORIGIN",
        shown="none",
    )
    allowed_methods: tuple[str, ...] = _option(
        ("*",), "allowed-methods", "methods that they may use", many=True, metavar="METHOD", shown="all"
    )
    allowed_headers: tuple[str, ...] = _option(
        ("*",), "allowed-headers", "headers that they may send", many=True, metavar="HEADER", shown="all"
    )
    allow_credentials: bool = _option(False, "allow-credentials", "they may send cookies and certificates", shown="off")
    api_keys: tuple[str, ...] = _option(
        (),
        "api-key",
        "one or several; each gives access to every route; browsers may send it as a password. Different keys share no "
        "cached prefix",
        many=True,
        metavar="KEY",
        shown="none",
    )
    allowed_hosts: tuple[str, ...] = _option(
        (),
        "allowed-hosts",
        "further host names accepted by a server without a key that listens only on this machine; addresses "
        "and names without a dot are always accepted",
        many=True,
        metavar="NAME",
        shown="none",
    )
    forwarded_allow_ips: tuple[str, ...] = _option(
        (),
        "forwarded-allow-ips",
        "addresses or networks of proxies before the server, such as `10.0.0.0/8`: their X-Forwarded-For tells clients "
        "apart, which are one client otherwise; `*` believes the header's first address from any sender",
        many=True,
        metavar="ADDRESS",
        shown="none",
    )
    loras: tuple[LoRARequest, ...] = _option(
        (),
        "lora-modules",
        "NAME=FOLDER...: LoRA adapters that requests may name as their model, with `--enable-lora`",
        many=True,
        metavar="NAME=FOLDER",
        shown="none",
    )
    max_body_bytes: int = _option(64 << 20, "max-body-mib", "largest request, in MiB", low=1, unit=1 << 20)
    max_reading_bytes: int = _option(
        1 << 30,
        "max-reading-mib",
        "limit for all request bodies together until their media are prepared, and for log-probabilities of prompts "
        "and of answers, beyond 20 a token or 64 MiB a request, until they are read; one client has at most three "
        "quarters of it; beyond it, requests get 503",
        low=1,
        unit=1 << 20,
    )
    max_requests: int = _option(
        1024,
        "max-concurrent-requests",
        "most running answers; beyond it, requests get 503 before they are read, but for those of clients that have "
        "few (up to a sixteenth), for which there is a fourth more",
        low=1,
    )
    drain_s: float = _option(
        30.0,
        "drain-timeout",
        "seconds for running answers after SIGTERM or Ctrl-C; a second signal ends at once",
        low=0.0,
        high=86400.0,
    )
    tool_parser: str | None = _option(
        None,
        "tool-call-parser",
        f"format of the model's tool calls: {', '.join(f'`{name}`' for name in FORMATS)}; `none` reads none",
        choices=(*FORMATS, NONE),
        plugin="tool_plugin",
        shown="from the model's family and its chat template",
    )
    reasoning_parser: str | None = _option(
        None,
        "reasoning-parser",
        "format of the model's reasoning, which becomes `reasoning_content`: "
        f"{', '.join(f'`{name}`' for name in reasoning.FORMATS)}; `none` leaves it in the text",
        choices=(*reasoning.FORMATS, NONE),
        plugin="reasoning_plugin",
        shown="from the model's family and its chat template",
    )
    tool_parser_plugin: str | None = _option(
        None,
        "tool-parser-plugin",
        "a Python file or a module with a parser of calls that was written for vLLM, which `--tool-call-parser` names; "
        "it gets whole answers",
        shown="none",
    )
    reasoning_parser_plugin: str | None = _option(
        None,
        "reasoning-parser-plugin",
        "the same of a parser of reasoning, which `--reasoning-parser` names",
        shown="none",
    )
    tool_plugin: type | None = None
    reasoning_plugin: type | None = None
    trust_templates: bool = _option(
        False, "trust-request-chat-template", "requests may contain a chat template", shown="off"
    )
    trust_processor_options: bool = _option(
        False,
        "trust-request-mm-kwargs",
        "requests may set processor options, also in content parts; media are then processed in workers",
        shown="off",
    )
    template_variables: Mapping[str, Any] | None = _option(
        None,
        "default-chat-template-kwargs",
        'variables of the chat template as a JSON object, such as `{"enable_thinking": false}`; those of a request go '
        "first",
        json=True,
        shown="none",
    )
    tells_usage: bool = _option(
        False, "enable-force-include-usage", "streams tell their usage so far and at the end, also unasked", shown="off"
    )
    tells_times: bool = _option(
        False,
        "enable-per-request-metrics",
        "a chat's answer has its times in `metrics`, a stream's with its usage: in the queue, until the first token, "
        "and of the others",
        shown="off",
    )
    tokens_as_ids: bool = _option(
        False,
        "return-tokens-as-token-ids",
        "log-probabilities name tokens `token_id:7` in place of their texts, unless a request says otherwise",
        shown="off",
    )
    takes_request_ids: bool = _option(
        False,
        "enable-request-id-headers",
        "the X-Request-Id of a request is that of its answer, and stands in the log; without one, it is 32 hexadecimal "
        "digits. The name is vLLM's",
        shown="off",
    )
    strict_fields: bool = _option(
        False,
        "strict-fields",
        "fields that have no effect here are refused; else they are accepted, and the answer's `warnings` name them",
        shown="off",
    )
    fair_shares: bool = _option(
        True,
        "no-fair-shares",
        "prompts are computed in the order of their arrival; else clients (keys if there are several, addresses "
        "otherwise) take turns",
        shown="",
    )
    max_stored_bytes: int = _option(
        256 << 20,
        "response-store-mib",
        "memory for responses of /v1/responses, which later requests can go on with; 0 stores none",
        low=0,
        unit=1 << 20,
    )
    max_recorded_bytes: int = _option(
        16 << 20,
        "resume-mib",
        "memory for streams that clients can take up again after a cut (header `X-Resumable: true`); 0 records none",
        low=0,
        unit=1 << 20,
    )
    show_page: bool = _option(True, "no-page", "no page at /", shown="")
    show_dashboard: bool = _option(
        False, "dashboard", "a live page of queue, KV cache, rates and latencies at /dashboard", shown="off"
    )
    hides_docs: bool = _option(
        False, "disable-fastapi-docs", "leave out `/docs` and `/openapi.json`; the name is vLLM's", shown="off"
    )
    operator_routes: bool = _option(
        False,
        "operator-routes",
        "routes by which every client that may send requests can let the engine sleep or pause, drop its caches, and "
        "read its configuration; also by `VLLM_SERVER_DEV_MODE=1`",
        shown="off",
    )
    changes_loras: bool = _option(
        False,
        "allow-runtime-lora-updating",
        "`/v1/load_lora_adapter`, `/v1/unload_lora_adapter` and `/adapters`, by which every client that may send "
        "requests makes the server read folders, with `--enable-lora`; also by `VLLM_ALLOW_RUNTIME_LORA_UPDATING=1`",
        shown="off",
    )
    sagemaker_sessions: bool = _option(
        False,
        "sagemaker-sessions",
        "`/invocations` begins and ends SageMaker's sessions; also by `SAGEMAKER_ENABLE_STATEFUL_SESSIONS=1`",
        shown="off",
    )
    tells_tokenizer: bool = _option(
        False, "enable-tokenizer-info-endpoint", "`/tokenizer_info`, the tokenizer's configuration", shown="off"
    )
    names: tuple[str, ...] = ("mote",)
    root: str | None = None
    # An answer of the model, and what the page says below it.
    advice: tuple[str, str] | None = None
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
            plugin = one.metadata.get("plugin")
            if plugin is None or getattr(self, plugin) is None:
                _check(one.metadata, getattr(self, one.name))
        if not self.host.strip():
            # The system would take an empty host for all addresses.
            raise ConfigError("--host is empty.", "Give an address; 0.0.0.0 means all of them.", param="host")
        self._check_reach()
        if not isinstance(self.template_variables, Mapping | None):
            raise ConfigError(
                "--default-chat-template-kwargs is no JSON object.",
                "Write it like '{\"enable_thinking\": false}'.",
                param="default_chat_template_kwargs",
            )
        for key in self.api_keys:
            if not key or key != key.strip() or not key.isprintable():
                raise ConfigError(
                    "An API key is empty or starts or ends with a space.", "Give each key as one word.", param="api_key"
                )
        if not all(self.names):
            raise ConfigError("A model name is empty.", "Leave it out.", param="served_model_name")
        if self.max_reading_bytes < self.max_body_bytes:
            raise ConfigError(
                "The limit of one body exceeds the limit of all bodies together.",
                "Raise --max-reading-mib, or lower --max-body-mib.",
                param="max_reading_mib",
            )

    def within(self, num_bytes: int) -> ServerOptions:
        """The same with a lower limit for all bodies together, if it was left at its default, where they could take
        more than half of `num_bytes`: until a request is prepared, its body takes up to four times its bytes."""
        default = next(one.default for one in fields(self) if one.name == "max_reading_bytes")
        most = max(self.max_body_bytes, num_bytes // 8)
        if self.max_reading_bytes != default or most >= default:
            return self
        return replace(self, max_reading_bytes=most)

    def shared(self, place: FrontPlace) -> ServerOptions:
        """The same with one front's share of the memory for streams that can be taken up again.

        Responses are stored by one front, and other limits the fronts have together (server/front_table.py).
        """
        return replace(self, max_recorded_bytes=place.share(self.max_recorded_bytes)) if place.count > 1 else self

    def _check_reach(self) -> None:
        """Check how clients reach the server.

        Raises:
            ConfigError: an option is of no use without another, or malformed.
        """
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ConfigError(
                f"--root-path must begin with a slash and end without one, got {self.root_path!r}.",
                "Write it like /models/vision.",
                param="root_path",
            )
        for address in self.forwarded_allow_ips:
            if address != "*" and not _is_network(address):
                raise ConfigError(
                    f"--forwarded-allow-ips does not accept {address!r}.",
                    "Give addresses such as 10.0.0.1, networks such as 10.0.0.0/8, or * alone.",
                    param="forwarded_allow_ips",
                )
        if self.ssl_certfile is None and (self.ssl_keyfile or self.ssl_ca_certs or self.ssl_ciphers):
            raise ConfigError("TLS needs a certificate.", "Give --ssl-certfile.", param="ssl_certfile")
        if self.ssl_cert_reqs and self.ssl_ca_certs is None:
            raise ConfigError(
                "Clients' certificates are checked with those of authorities.",
                "Give --ssl-ca-certs.",
                param="ssl_ca_certs",
            )
        if self.allow_credentials and "*" in self.allowed_origins:
            raise ConfigError(
                "--allow-credentials with all origins would let every site act as the user.",
                "Name the origins, or leave it out: keys are sent in headers.",
                param="allow_credentials",
            )

    @property
    def max_connections(self) -> int:
        """The most connections at once."""
        return 4 * self.max_requests + 256


def _is_network(address: str) -> bool:
    try:
        ipaddress.ip_network(address)
    except ValueError:
        return False
    return True


def _check(metadata: Any, value: Any) -> None:
    flag = metadata.get("flag")
    if flag is None or value is None:
        return
    unit = metadata.get("unit", 1)
    low, high = metadata.get("low", -math.inf) * unit, metadata.get("high", math.inf) * unit
    param = flag.replace("-", "_")
    if isinstance(value, int | float) and not low <= value <= high:
        span = f"at least {low / unit:g}" if high == math.inf else f"from {low / unit:g} to {high / unit:g}"
        raise ConfigError(f"--{flag} must be {span}, got {value / unit:g}.", "Choose another value.", param=param)
    if "choices" in metadata and value not in metadata["choices"]:
        raise ConfigError(
            f"--{flag} does not accept {value!r}.", f"Known: {', '.join(metadata['choices'])}.", param=param
        )
