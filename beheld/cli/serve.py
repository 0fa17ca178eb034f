"""`beheld serve [MODEL]`: the OpenAI-compatible server, and a page to try it."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from beheld.cli.flags import add_server_flags, apply_file, engine_options, server_values
from beheld.cli.plugins import with_plugins
from beheld.core.errors import ConfigError
from beheld.core.request import LoRARequest
from beheld.flags.engine import add_engine_flags
from beheld.mote import UNKNOWN
from beheld.platform import host
from beheld.platform.probe import has_accelerator
from beheld.utils import env
from beheld.utils.allocator import share_arenas
from beheld.utils.gc_tuning import paused_collector, set_aside
from beheld.utils.log import get_logger

if TYPE_CHECKING:
    from beheld.engine.process import Spawned
    from beheld.server.options import ServerOptions

logger = get_logger(__name__)

# Of an engine, its front, and what prepares media for it.
_CORES_EACH = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "model_tag", nargs="?", metavar="MODEL", help="a folder, a GGUF file or a hub name; without it, mote"
    )
    parser.add_argument("--config", metavar="FILE", help="a YAML file of options; those given as flags go first")
    group = parser.add_argument_group("server options")
    actions = [
        group.add_argument("--model", "-m", default=None, help="the same as MODEL"),
        group.add_argument(
            "--engine",
            choices=("process", "thread"),
            default=None,
            help="where the engine runs (default: process with a GPU)",
        ),
        group.add_argument(
            "--api-server-count",
            "-asc",
            type=int,
            default=None,
            metavar="N",
            help="processes that speak HTTP (default: 1; as many as engines if these have GPUs and four cores each); "
            "with several, the engine is in a process of its own",
        ),
        group.add_argument(
            "--enable-auto-tool-choice", action="store_true", default=None, help="always on; known for old scripts"
        ),
        *add_server_flags(group),
        *add_engine_flags(parser, list_nargs="+"),
    ]
    parser.set_defaults(run=lambda arguments: run(arguments, actions))


def run(arguments: argparse.Namespace, actions: Sequence[argparse.Action]) -> int:
    """Serve until a signal. `actions` are the options that a file may name."""
    if arguments.config:
        apply_file(arguments, Path(arguments.config), actions)
    model = model_of(arguments, actions)
    options = engine_options(arguments, answers=True)
    server = server_options(arguments, model, options)
    kept_apart(server, options)
    count = arguments.api_server_count
    if count is None:
        count = _usual_fronts(arguments, options, server)
    several_fronts(count, arguments, server)
    with _ended_by_signal() as leaving:
        where = place_of(arguments, model, options, count)
        if count == 1:
            return _serve(model, options, server, where)
        return _serve_all(model, options, server, count, leaving)


def _serve_all(
    model: str | None, options: dict[str, Any], server: ServerOptions, count: int, leaving: list[Callable[[], None]]
) -> int:
    """Serve with several fronts, of which this process is one; `leaving` is as of _ended_by_signal."""
    from beheld.cli.fronts import Fronts
    from beheld.core.config import EngineArgs

    with paused_collector():
        from beheld.server.listen import listen

    share_arenas()
    listener = listen(server)
    spawned = _spawned(options) if options.get("data_parallel_backend") != "ray" else None
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    fitting = replace(fit_bodies(server), advice=_advice(model, "process"))
    args = EngineArgs.from_keywords({"model": model, **options})
    fronts = Fronts(count, args, fitting, listener)
    leaving.append(fronts.remove_folder)
    try:
        with paused_collector():
            from beheld.api.async_llm import AsyncLLM
            from beheld.api.start import start_processes
            from beheld.engine.shared_engine import SharedEngine
            from beheld.server.serve import run as serve

            remote = start_processes(args, spawned, fronts.neighbours.place, fronts.warm)
            llm = AsyncLLM(model, engine=remote, **options)
        try:
            set_aside()
            assert isinstance(remote.engine, SharedEngine)
            fronts.join(remote.engine, remote.info, remote.config)
            serve(llm, fitting, listener, fronts.neighbours, fronts)
            return 0 if llm.alive else 3
        finally:
            fronts.close()
            llm.close()
    finally:
        fronts.close()


def _usual_fronts(arguments: argparse.Namespace, options: dict[str, Any], server: ServerOptions) -> int:
    """Return how many processes speak HTTP: one for each engine with a GPU, where there are cores for them.

    Behind one front, two engines answer 1.2 times what one does, and with one each twice as much.
    """
    engines = int(options.get("data_parallel_size", 1))
    alone = server.changes_loras or server.sagemaker_sessions
    if engines == 1 or options.get("data_parallel_backend") == "ray" or alone:
        return 1
    if not has_accelerator(arguments.device) or len(os.sched_getaffinity(0)) < _CORES_EACH * engines:
        return 1
    logger.info("%d processes speak HTTP, one for each engine (--api-server-count).", engines)
    return engines


def several_fronts(count: int, arguments: argparse.Namespace, server: ServerOptions) -> None:
    """Check that the options go with so many processes that speak HTTP.

    Raises:
        ConfigError: they do not.
    """
    if count < 1:
        raise ConfigError(
            f"--api-server-count must be at least 1, got {count}.", "Leave it out for 1.", param="api_server_count"
        )
    if count == 1:
        return
    if arguments.engine == "thread":
        raise ConfigError(
            f"--api-server-count {count} needs the engine in a process of its own, and --engine thread has it in the "
            "server's.",
            "Leave --engine out.",
            param="api_server_count",
        )
    if server.changes_loras:
        raise ConfigError(
            "--allow-runtime-lora-updating is for one process that speaks HTTP: others would not know the adapters.",
            "Leave --api-server-count out, or name the adapters with --lora-modules.",
            param="api_server_count",
        )
    if server.sagemaker_sessions:
        raise ConfigError(
            "--sagemaker-sessions is for one process that speaks HTTP: others would not know the sessions.",
            "Leave --api-server-count out.",
            param="api_server_count",
        )


def _serve(model: str | None, options: dict[str, Any], server: ServerOptions, where: str) -> int:
    with paused_collector():
        from beheld.server.listen import listen

    listener = listen(server)
    place: str | list[Spawned] = where
    if where == "process" and options.get("data_parallel_backend") != "ray":
        place = [_forked()] if _on_cores_alone(options) else _spawned(options)
    # After a fork: the engine has arenas of its own.
    share_arenas()
    if where == "process":
        # Work in this process, such as processing an image, takes milliseconds; several threads would only wait for
        # the engine's cores. Set before torch loads and after the engine process has started.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    with paused_collector():
        from beheld.api.async_llm import AsyncLLM
        from beheld.server.serve import run as serve

        llm = AsyncLLM(model, engine=place, **options)
    try:
        set_aside()
        serve(llm, replace(fit_bodies(server), advice=_advice(model, where)), listener)
        return 0 if llm.alive else 3
    finally:
        llm.close()


def fit_bodies(server: ServerOptions) -> ServerOptions:
    """Fit the limit on request bodies to the memory that the process's control group leaves, if it has a limit."""
    group = host.group_memory()
    if group is None:
        return server
    fitting = server.within(group[0])
    if fitting != server:
        logger.info(
            "The container leaves %d MiB: all request bodies together may have %d MiB (--max-reading-mib).",
            group[0] >> 20,
            fitting.max_reading_bytes >> 20,
        )
    return fitting


def _advice(model: str | None, where: str) -> tuple[str, str] | None:
    """Return what the embedded model answers about images of unknown kinds, and what the page says then."""
    if model not in (None, "mote"):
        return None
    if where == "process":
        # Asking an accelerator for its memory would take some of it in this process.
        return UNKNOWN, "For photographs it takes a real model: `beheld models --fits` lists those for this machine."
    from beheld.tools.fits import command_for_photographs

    return UNKNOWN, command_for_photographs("beheld serve")


def _on_cores_alone(options: dict[str, Any]) -> bool:
    """Whether there is one engine, on the host's cores."""
    return options.get("data_parallel_size", 1) == 1 and not has_accelerator(options.get("device"))


def _forked() -> Spawned:
    """Start the process of an engine that competes for cores with this one: libraries are imported once for both."""
    from beheld.engine.forked import can_fork

    if not can_fork():
        from beheld.engine.process import spawn

        # It loads its libraries while this one loads its own.
        return spawn()
    if "OMP_NUM_THREADS" not in os.environ:
        # NumPy takes the number of its threads as it is loaded, and work in this process takes milliseconds. The
        # engine's copy computes with torch.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from beheld.api.start import fork_engine

    return fork_engine()


def _spawned(options: dict[str, Any]) -> list[Spawned]:
    """Start the processes of the engines, which load their libraries while this one loads its own."""
    from beheld.engine.process import spawn
    from beheld.engine.process_group import spawn_all

    num_engines = options.get("data_parallel_size", 1)
    if num_engines == 1:
        return [spawn()]
    ranks_each = options.get("tensor_parallel_size", 1) * options.get("pipeline_parallel_size", 1)
    return spawn_all(num_engines, ranks_each, options.get("device"))


@contextlib.contextmanager
def _ended_by_signal() -> Iterator[list[Callable[[], None]]]:
    """Exit with status 0 on SIGTERM until the server sets its own draining handler, after calling what is in the list
    that is given."""
    leaving: list[Callable[[], None]] = []
    if threading.current_thread() is not threading.main_thread():
        yield leaving
        return

    def leave(number: int, frame: FrameType | None) -> None:
        for each in leaving:
            each()
        # Not an exception, which an import in progress might catch. The engine's process ends with this one.
        os._exit(0)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield leaving
    finally:
        signal.signal(signal.SIGTERM, before)


def model_of(arguments: argparse.Namespace, actions: Sequence[argparse.Action]) -> str | None:
    """Return the named model; None means mote.

    Raises:
        ConfigError: two models or an empty name are given, or a model follows an option that takes several values.
    """
    tag, named = arguments.model_tag, arguments.model
    if tag == "" or named == "":
        raise ConfigError("The model's name is empty.", "Leave it out for mote.", param="model")
    if tag and named and tag != named:
        raise ConfigError("MODEL and --model name different models.", "Give one.", param="model")
    if tag or named:
        return str(tag or named)
    for action in actions:
        # argparse reads `--api-key KEY MODEL` as two keys and no model.
        values = getattr(arguments, action.dest) if action.nargs == "+" else None
        if values and len(values) > 1 and _like_a_model(values[-1]):
            raise ConfigError(
                f"The last value of {action.option_strings[0]} looks like a model, and no model is named.",
                "Write MODEL before the options, or use --model.",
                param="model",
            )
    return None


def _like_a_model(word: str) -> bool:
    return word != "" and "=" not in word and ("/" in word or Path(word).expanduser().is_dir())


def kept_apart(server: ServerOptions, engine: dict[str, Any]) -> None:
    """Force media processing into killable processes if requests may set processor options, which can make a small
    item arbitrarily expensive. Changes `engine`, the engine options.

    Raises:
        ConfigError: these processes are switched off.
    """
    if not server.trust_processor_options:
        return
    if engine.get("media_work", "auto") not in ("auto", "process") or engine.get("media_workers") == 0:
        raise ConfigError(
            "--trust-request-mm-kwargs needs processes that process media and can be killed.",
            "Leave --media-work and --media-workers out.",
            param="trust_request_mm_kwargs",
        )
    engine["media_work"] = "process"


def place_of(arguments: argparse.Namespace, model: str | None, engine: dict[str, Any], num_fronts: int = 1) -> str:
    """Return where the engine runs: by default in a thread on a CPU, where two processes would compete for cores.

    With several fronts it is a process. With logits processors it is a thread: functions are not sent to a process.
    Those of installed packages do not count where the model pools: they are taken out of `engine`, the engine options.

    Raises:
        ConfigError: several engines are to run in a thread, or an engine with logits processors in a process.
        ModelError: there are processors of packages, and no such model.
    """
    several = engine.get("data_parallel_size", 1) > 1
    if several and arguments.engine == "thread":
        raise ConfigError(
            "--engine thread is for one engine, and --data-parallel-size asks for several.",
            "Leave --engine out.",
            param="engine",
        )
    fixed = several or num_fronts > 1 or arguments.engine is not None
    place = str(arguments.engine or ("process" if fixed or has_accelerator(arguments.device) else "thread"))
    if place == "thread" or not engine.get("logits_processors"):
        return place
    # Before the process starts.
    from beheld.core.config import EngineArgs
    from beheld.core.logits_processors import check_in_process
    from beheld.engine.setup import without_unused

    engine["logits_processors"] = without_unused(EngineArgs.from_keywords({"model": model, **engine})).logits_processors
    if not engine["logits_processors"]:
        del engine["logits_processors"]
        return place
    if fixed:
        check_in_process(engine["logits_processors"])
    return "thread"


def server_options(arguments: argparse.Namespace, model: str | None, engine: dict[str, Any]) -> ServerOptions:
    """Return the server options of the command line.

    Raises:
        ConfigError: a value is out of range or empty.
    """
    from beheld.server.options import ServerOptions

    names = engine.get("served_model_name") or _names(model)
    alias = () if model is None or model in names else (model,)
    said = server_values(arguments)
    keys = tuple(said.pop("api_keys", None) or _keys_of_environment())
    loras = adapters(said.pop("loras", ()), (*names, *alias), engine)
    hosts = tuple(said.pop("allowed_hosts", ()))
    if "forwarded_allow_ips" in said:
        # As uvicorn has it, addresses may stand in one word.
        said["forwarded_allow_ips"] = tuple(
            part for word in said["forwarded_allow_ips"] for part in word.split(",") if part
        )
    for name in ("allowed_origins", "allowed_methods", "allowed_headers"):
        if name in said:
            said[name] = _words(said[name], name)
    for name, variable in (
        ("operator_routes", env.OPERATOR_ROUTES),
        ("changes_loras", env.CHANGE_LORAS),
        ("sagemaker_sessions", env.SAGEMAKER_SESSIONS),
    ):
        said[name] = said.get(name, False) or variable()
    if said["changes_loras"] and not engine.get("enable_lora"):
        raise ConfigError(
            "--allow-runtime-lora-updating needs adapters.", "Add --enable-lora.", param="allow_runtime_lora_updating"
        )
    # `--root-path /` is none.
    said |= {"root_path": ""} if said.get("root_path") == "/" else {}
    said = with_plugins(said)
    said |= {"names": tuple(names), "root": _names(model)[0], "aliases": alias}
    return ServerOptions(loras=loras, api_keys=keys, allowed_hosts=hosts, **said)


def _words(given: Sequence[str], name: str) -> tuple[str, ...]:
    """Return the words of an option, or, as vLLM's flags have them, of one JSON list.

    Raises:
        ConfigError: it looks like a list, and is none of words.
    """
    if len(given) != 1 or not given[0].startswith("["):
        return tuple(given)
    try:
        found = json.loads(given[0])
    except ValueError:
        found = None
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise ConfigError(f"--{name.replace('_', '-')} is no JSON list of texts.", "Write words.", param=name)
    return tuple(found)


def _keys_of_environment() -> tuple[str, ...]:
    """Return the key of the first variable that is set. An empty one is refused: it would open the server."""
    for name in ("BEHELD_API_KEY", "VLLM_API_KEY"):
        key = os.environ.get(name)
        if key is not None and not key.strip():
            raise ConfigError(f"{name} is set, but empty.", "Give it a key, or unset it.", param="api_key")
        if key is not None:
            return (key,)
    return ()


def adapters(given: Sequence[str], taken: Sequence[str], engine: dict[str, Any]) -> tuple[LoRARequest, ...]:
    """Parse --lora-modules: NAME=FOLDER, or JSON with "name" and "path". All adapters stay in memory unless
    max_cpu_loras in `engine` says otherwise.

    Raises:
        ConfigError: an entry is malformed, its name is taken, or adapters are not enabled.
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
    """Return the served names: a hub name unchanged, a folder's last component (answers show the name)."""
    if model is None:
        return ("mote",)
    return (Path(model).resolve().name,) if Path(model).expanduser().exists() else (model,)
