"""A further front of `beheld serve --api-server-count N`: a process that speaks HTTP for an engine that another has.

FrontStart, Decisions (before the weights are loaded), Decisions (final)   ->  front
FrontReady, then messages to the engine                                    <-
replies of the engine                                                      ->
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace

from beheld.api.front_place import FrontPlace
from beheld.cli.plugins import with_plugins
from beheld.core.config import EngineArgs, EngineConfig, ModelInfo
from beheld.core.errors import BeheldError
from beheld.engine.codec import codec_with
from beheld.engine.messages import Decisions, Failed
from beheld.engine.shared_engine import RelayedEngine, link_to_main
from beheld.server.neighbours import Neighbours
from beheld.server.options import ServerOptions
from beheld.utils.allocator import share_arenas
from beheld.utils.gc_tuning import paused_collector, set_aside


@dataclass(frozen=True, eq=False)
class FrontStart:
    """What a front is started with.

    Attributes:
        args: the engine's options.
        options: the server's, without the parsers of plug-ins, whose classes the front loads itself.
        parsers: the names of the parsers, by option.
        neighbours: which front it is.
    """

    args: EngineArgs
    options: ServerOptions
    parsers: Mapping[str, str | None]
    neighbours: Neighbours


@dataclass(frozen=True)
class FrontReady:
    """The front is ready: it serves as soon as it has sent this."""


CODEC = codec_with((FrontStart, FrontReady, ServerOptions, Neighbours, FrontPlace))


def without_plugins(options: ServerOptions) -> ServerOptions:
    """The options as they cross to another process: no classes, and no names that only these make valid."""
    return replace(options, tool_plugin=None, reasoning_plugin=None, tool_parser=None, reasoning_parser=None)


def _with_plugins(start: FrontStart) -> ServerOptions:
    plugins = {name: getattr(start.options, name) for name in ("tool_parser_plugin", "reasoning_parser_plugin")}
    return replace(start.options, **with_plugins({**plugins, **start.parsers}))


def main(descriptor: int, listener: int, table: int) -> None:
    """Be a front until a signal, or until the process that has the engine ends.

    Args:
        descriptor: of the connection to that process.
        listener: of the socket where clients connect.
        table: of the fronts' table, as `Neighbours.table`.
    """
    # Until the server sets its own handler.
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(0))
    share_arenas()
    os.set_inheritable(table, False)
    link = link_to_main(descriptor, CODEC)
    start: FrontStart = link.receive()

    def decided() -> tuple[ModelInfo, EngineConfig]:
        decisions: Decisions = link.receive()
        return decisions.info, decisions.config

    with paused_collector():
        from beheld.api.async_llm import AsyncLLM
        from beheld.api.start import start_front
        from beheld.server.serve import run

        try:
            options = _with_plugins(start)
            remote = start_front(start.args, RelayedEngine(link), start.neighbours.place, decided)
        except BeheldError as error:
            link.send(Failed(error))
            return
        link.send(FrontReady())
        llm = AsyncLLM(engine=remote, **vars(start.args))
    try:
        set_aside()
        accepting = socket.socket(fileno=listener)
        accepting.set_inheritable(False)
        run(llm, options, accepting, start.neighbours)
    finally:
        llm.close()


if __name__ == "__main__":
    # By its name: classes of `__main__` are others than those that the codec of the other side knows.
    from beheld.cli import front

    front.main(*map(int, sys.argv[1:]))
    # There is nothing to save.
    os._exit(0)
