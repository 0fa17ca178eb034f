"""`beheld serve [MODEL]`: the OpenAI-compatible server, and a page to try it."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from beheld.cli.flags import add_engine_flags, engine_options
from beheld.core.errors import ConfigError
from beheld.core.params import nearest
from beheld.core.request import LoRARequest

if TYPE_CHECKING:
    from beheld.server.options import ServerOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="a folder or a hub name; without it, mote")
    parser.add_argument("--model", default=None, help="the same as MODEL")
    parser.add_argument("--config", metavar="FILE", help="a YAML file of options; those given as flags go first")
    group = parser.add_argument_group("server options")
    group.add_argument("--host", default=None, help="address to listen at (default: 127.0.0.1, this machine only)")
    group.add_argument("--port", type=int, default=None, help="port to listen at; 0 takes a free one (default: 8000)")
    group.add_argument(
        "--api-key", nargs="+", default=None, metavar="KEY", help="keys that open the server (or BEHELD_API_KEY)"
    )
    group.add_argument("--max-body-mib", type=int, default=None, help="largest request, in MiB (default: 64)")
    group.add_argument(
        "--max-concurrent-requests",
        type=int,
        default=None,
        help="answers in work at once; more get 503 (default: 1024)",
    )
    group.add_argument(
        "--engine",
        choices=("process", "thread"),
        default=None,
        help="where the engine runs (default: process with a GPU)",
    )
    group.add_argument("--drain-timeout", type=float, default=None, help="seconds for running answers after SIGTERM")
    group.add_argument("--tool-call-parser", choices=("hermes", "json"), help="how the model writes tool calls")
    group.add_argument(
        "--enable-auto-tool-choice", action="store_true", default=None, help="always on; known for old scripts"
    )
    group.add_argument("--reasoning-parser", choices=("think",), help="tell thoughts in <think> from the answer")
    group.add_argument(
        "--trust-request-chat-template", action="store_true", default=None, help="requests may bring one"
    )
    group.add_argument("--trust-request-mm-kwargs", action="store_true", default=None, help="... processor options")
    group.add_argument(
        "--lora-modules",
        nargs="+",
        default=None,
        metavar="NAME=FOLDER",
        help="adapters that requests may name as model",
    )
    group.add_argument("--no-page", action="store_true", default=None, help="do not serve the page at /")
    add_engine_flags(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal."""
    if arguments.config:
        _apply_config(arguments, Path(arguments.config))
    if arguments.model_tag and arguments.model and arguments.model_tag != arguments.model:
        raise ConfigError("MODEL and --model name different models.", "Give one.", param="model")
    model = arguments.model_tag or arguments.model
    options = engine_options(arguments)
    server = server_options(arguments, model, options)
    from beheld.server.listen import listen

    listener = listen(server)
    from beheld.engine.process import spawn

    # The engine's process loads its libraries while this one loads the same.
    place = spawn() if _place(arguments) == "process" else "thread"
    from beheld.api.async_llm import AsyncLLM
    from beheld.server.serve import run as serve

    llm = AsyncLLM(model, engine=place, **options)
    try:
        serve(llm, server, listener)
        return 0 if llm.alive else 3
    finally:
        llm.close()


def _place(arguments: argparse.Namespace) -> str:
    """Where the engine runs if nothing was said: on a CPU both sides would only take each other's cores."""
    if arguments.engine is not None:
        return str(arguments.engine)
    gpu = arguments.device != "cpu" and Path("/dev/nvidiactl").exists()
    return "process" if gpu else "thread"


def server_options(arguments: argparse.Namespace, model: str | None, engine: dict[str, Any]) -> ServerOptions:
    """The server's part of the command line.

    Raises:
        ConfigError: a value is out of range.
    """
    from beheld.server.options import ServerOptions

    names = engine.get("served_model_name") or _names(model)
    named = (names,) if isinstance(names, str) else tuple(names)
    keys = arguments.api_key or [os.environ.get("BEHELD_API_KEY") or os.environ.get("VLLM_API_KEY") or ""]
    given = {
        "host": arguments.host,
        "port": arguments.port,
        "max_body_bytes": None if arguments.max_body_mib is None else arguments.max_body_mib << 20,
        "max_requests": arguments.max_concurrent_requests,
        "drain_s": arguments.drain_timeout,
        "tool_parser": arguments.tool_call_parser,
        "reasoning_parser": arguments.reasoning_parser,
        "trust_templates": arguments.trust_request_chat_template,
        "trust_processor_options": arguments.trust_request_mm_kwargs,
        "show_page": None if arguments.no_page is None else not arguments.no_page,
    }
    for name in ("max_body_bytes", "max_requests"):
        if given[name] is not None and given[name] < 1:
            raise ConfigError(f"{name} must be above 0.", param=name)
    if arguments.port is not None and not 0 <= arguments.port < 65536:
        raise ConfigError(f"There is no port {arguments.port}.", param="port")
    said = {name: value for name, value in given.items() if value is not None}
    alias = () if model is None or model in named else (model,)
    loras = adapters(arguments.lora_modules or (), (*named, *alias), engine)
    return ServerOptions(names=named, aliases=alias, loras=loras, api_keys=tuple(key for key in keys if key), **said)


def adapters(given: Sequence[str], taken: Sequence[str], engine: dict[str, Any]) -> tuple[LoRARequest, ...]:
    """What --lora-modules names: NAME=FOLDER, or JSON with "name" and "path". All are kept in memory, if none was told
    how many (`engine`'s max_cpu_loras).

    Raises:
        ConfigError: an entry is none of these, or its name is taken; or adapters are not enabled.
    """
    if given and not engine.get("enable_lora"):
        raise ConfigError("--lora-modules need adapters.", "Add --enable-lora.", param="lora_modules")
    made: list[LoRARequest] = []
    for number, entry in enumerate(given, 1):
        name, path = _module(entry)
        if name in (*taken, *(lora.lora_name for lora in made)):
            raise ConfigError(f"The name {name!r} is taken.", "Give each adapter its own.", param="lora_modules")
        made.append(LoRARequest(name, number, path))
    if made:
        engine.setdefault("max_cpu_loras", max(engine.get("max_loras", 1), len(made)))
    return tuple(made)


def _module(entry: str) -> tuple[str, str]:
    name, _, path = entry.partition("=")
    if entry.startswith("{"):
        try:
            said = json.loads(entry)
        except ValueError as error:
            raise ConfigError(f"{entry[:128]!r} is not JSON.", param="lora_modules") from error
        unknown = sorted(set(said) - {"name", "path", "base_model_name"})
        if unknown:
            raise ConfigError(f"Unknown field {unknown[0]!r} of an adapter.", param="lora_modules")
        name, path = said.get("name"), said.get("path")
    if not (isinstance(name, str) and name and isinstance(path, str) and path):
        raise ConfigError(
            f"{entry[:128]!r} is not an adapter.",
            "Write NAME=FOLDER, or JSON with name and path.",
            param="lora_modules",
        )
    return name, path


def _names(model: str | None) -> tuple[str, ...]:
    """A hub name as it is; of a folder only its last part, since answers show the name."""
    if model is None:
        return ("mote",)
    return (Path(model).resolve().name,) if Path(model).expanduser().exists() else (model,)


def _apply_config(arguments: argparse.Namespace, path: Path) -> None:
    """Take from the file what the command line leaves open.

    Raises:
        ConfigError: the file cannot be read, or names an unknown option.
    """
    import yaml

    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"The file {str(path)!r} cannot be read as YAML.", param="config") from error
    if not isinstance(values, dict):
        raise ConfigError(f"The file {str(path)!r} is not a mapping of options.", param="config")
    known = set(vars(arguments)) - {"run", "command", "config", "model_tag"}
    for name, value in values.items():
        key = str(name).replace("-", "_")
        if key not in known:
            raise ConfigError(f"Unknown option {name!r} in {str(path)!r}.", nearest(key, known), param=key)
        if getattr(arguments, key) is None:
            setattr(arguments, key, [value] if key == "api_key" and isinstance(value, str) else value)
