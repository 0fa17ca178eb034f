"""What a server was told: addresses, keys, limits and what it trusts its clients with."""

from __future__ import annotations

from dataclasses import dataclass

from beheld.core.request import LoRARequest


@dataclass(frozen=True)
class ServerOptions:
    """Options of the server, beside those of the engine.

    Attributes:
        host, port: where it listens; port 0 takes a free one.
        api_keys: any of them opens every route; none means that no key is asked for.
        names: the model's names in requests; the first is the one it answers with.
        aliases: further names that requests may use, and that are not shown.
        loras: adapters that requests may name as their model.
        max_body_bytes: of a request.
        max_requests: in work at once; beyond it clients are asked to come back later.
        max_answers: n of one request, and prompts of one request.
        max_tools: tools in one request.
        header_s, body_s: how long a client may take to send its headers, and its body.
        send_s: how long a client may leave an answer unread.
        keep_alive_s: how long an idle connection is kept.
        drain_s: how long running answers may take after SIGTERM.
        health_s: how long the engine may take to answer /health.
        trust_templates: chat_template in requests is honoured.
        trust_processor_options: mm_processor_kwargs in requests, and processor options in content parts, are honoured.
        tool_parser, reasoning_parser: how the model writes tool calls and its thoughts; None leaves them in the text.
        show_page: the page to try the model is served at /.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    names: tuple[str, ...] = ("mote",)
    aliases: tuple[str, ...] = ()
    loras: tuple[LoRARequest, ...] = ()
    max_body_bytes: int = 64 << 20
    max_requests: int = 1024
    max_answers: int = 64
    max_tools: int = 128
    header_s: float = 10.0
    body_s: float = 60.0
    send_s: float = 30.0
    keep_alive_s: float = 30.0
    drain_s: float = 30.0
    health_s: float = 8.0
    trust_templates: bool = False
    trust_processor_options: bool = False
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    show_page: bool = True
