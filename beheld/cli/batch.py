"""`beheld batch INPUT OUTPUT` and `beheld run-batch -i INPUT -o OUTPUT`: jobs over files."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import glob
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from beheld.cli import serve
from beheld.cli.flags import add_server_flags, engine_options
from beheld.cli.media import AUDIO, IMAGE, VIDEO, modality_of
from beheld.cluster.session import need_ray
from beheld.core.errors import ConfigError
from beheld.flags.engine import add_engine_flags
from beheld.platform.probe import has_accelerator
from beheld.utils.gc_tuning import paused_collector

if TYPE_CHECKING:
    from beheld.jobs.items import BadLine, Item
    from beheld.jobs.job import Progress
    from beheld.jobs.metrics_port import MetricsPort
    from beheld.jobs.output import OutputFile
    from beheld.server.options import ServerOptions

# Server options that a job has: those of a model's answers, not those of sockets.
_PLUGINS = ("tool_parser_plugin", "reasoning_parser_plugin")
_SERVER = frozenset(
    ("loras", "tool_parser", "reasoning_parser", *_PLUGINS, "trust_templates", "strict_fields", "max_body_bytes")
)
# Files of a folder that count as media.
_ENDINGS = IMAGE | VIDEO | AUDIO
# Seconds between two states of the progress line.
_SHOWN_S = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `batch`."""
    parser.add_argument(
        "input",
        metavar="INPUT",
        help="a .jsonl file of requests, here or as s3://BUCKET/KEY, a folder of media, or a pattern",
    )
    parser.add_argument("output", metavar="OUTPUT", help="a file of JSON lines")
    group = parser.add_argument_group("media options")
    group.add_argument("--prompt", help="the question about every media file")
    group.add_argument("--max-tokens", type=int, default=None, help="longest answer, in tokens (default: 256)")
    group.add_argument("--temperature", type=float, default=None, help="0 takes the likeliest token (default: 0)")
    _add_common(parser)


def add_run_batch_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `run-batch`, which has vLLM's spelling."""
    parser.add_argument(
        "-i",
        "--input-file",
        dest="input",
        metavar="FILE",
        required=True,
        help="a file of requests, here or as s3://BUCKET/KEY",
    )
    parser.add_argument(
        "-o", "--output-file", dest="output", metavar="FILE", required=True, help="a file of JSON lines"
    )
    _add_common(parser)
    parser.add_argument(
        "--enable-auto-tool-choice", action="store_true", default=None, help="always on; known for old scripts"
    )
    parser.set_defaults(prompt=None, max_tokens=None, temperature=None)


def _add_common(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("job options")
    group.add_argument(
        "-m", "--model", help="a folder, a GGUF file, a hub name or a short name; without it the embedded model answers"
    )
    group.add_argument("--resume", action="store_true", help="go on with the output of a job that ended early")
    group.add_argument("--concurrency", type=int, help="most requests under way (default: twice --max-num-seqs)")
    group.add_argument(
        "--ray", action="store_true", help="share the job out in a Ray cluster, to --data-parallel-size engines"
    )
    group.add_argument(
        "--enable-metrics", action="store_true", help="show the job's metrics at http://HOST:PORT/metrics while it runs"
    )
    group.add_argument(
        "--host", "--url", default=None, metavar="HOST", help="address of the metrics (default: 127.0.0.1)"
    )
    group.add_argument("--port", type=int, default=None, help="port of the metrics (default: 8000)")
    group.add_argument("--engine", choices=("process", "thread"), help="where the engine runs (as in serve)")
    add_server_flags(parser.add_argument_group("request options"), names=_SERVER)
    add_engine_flags(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the job; 1 if some lines have not the form of a request, although the others are answered."""
    if arguments.concurrency is not None and arguments.concurrency < 1:
        raise ConfigError("--concurrency must be at least 1.", "Choose another value.", param="concurrency")
    options = engine_options(arguments, answers=True)
    make, size = _source(arguments, options)
    server = serve.server_options(arguments, arguments.model, options)
    from beheld.jobs.output import OutputFile

    if arguments.ray:
        plugin = next((name for name in _PLUGINS if getattr(server, name) is not None), None)
        if plugin is not None:
            raise ConfigError(
                f"--{plugin.replace('_', '-')} is a file of this machine, which a cluster's others lack.",
                "Leave out --ray, or the plug-in.",
                param=plugin,
            )
        if arguments.enable_metrics:
            raise ConfigError(
                "--enable-metrics shows one engine of this machine, and a cluster has several elsewhere.",
                "Leave out --ray, or --enable-metrics.",
                param="enable_metrics",
            )
        need_ray("beheld batch --ray", "ray")
    output = OutputFile(Path(arguments.output), resume=arguments.resume)
    try:
        from beheld.jobs.job import Progress, run_job

        if arguments.ray:
            progress, tell = Progress(), _ProgressLine(size)
            try:
                _run_in_cluster(arguments, options, server, make(), output, progress, tell)
            finally:
                tell.end()
                print(summary(progress), file=sys.stderr)
            return 1 if progress.malformed else 0
        with _metrics_port(server, wanted=arguments.enable_metrics) as port:
            where = serve.place_of(arguments, arguments.model, options)
            with paused_collector():
                from beheld.api.async_llm import AsyncLLM

                llm = AsyncLLM(arguments.model, engine=where, **options)
            progress, tell = Progress(), _ProgressLine(size)
            try:
                most = arguments.concurrency or 2 * llm.config.max_num_seqs
                asked = (llm, server, make(), output)
                asyncio.run(run_job(*asked, concurrency=most, progress=progress, tell=tell, metrics_port=port))
            finally:
                tell.end()
                llm.close()
                print(summary(progress), file=sys.stderr)
    finally:
        output.close()
    return 1 if progress.malformed else 0


@contextlib.contextmanager
def _metrics_port(server: ServerOptions, *, wanted: bool) -> Iterator[MetricsPort | None]:
    """Open the port, if it is `wanted`, and say where it is."""
    if not wanted:
        yield None
        return
    from beheld.jobs.metrics_port import MetricsPort

    with contextlib.closing(MetricsPort(server)) as made:
        host = f"[{server.host}]" if ":" in server.host else server.host
        print(f"beheld: metrics at http://{host}:{made.port}/metrics", file=sys.stderr)
        yield made


def _run_in_cluster(
    arguments: argparse.Namespace,
    options: dict[str, Any],
    server: ServerOptions,
    items: Iterator[Item | BadLine],
    output: OutputFile,
    progress: Progress,
    tell: Callable[[Progress], None],
) -> None:
    from beheld.jobs.ray_job import run_ray_job

    gpus = options.get("tensor_parallel_size", 1) * options.get("pipeline_parallel_size", 1)
    run_ray_job(
        arguments.model,
        options,
        server,
        items,
        output,
        gpus_each=gpus if has_accelerator(arguments.device) else 0,
        concurrency=arguments.concurrency,
        progress=progress,
        tell=tell,
    )


def _source(
    arguments: argparse.Namespace, options: dict[str, Any]
) -> tuple[Callable[[], Iterator[Item | BadLine]], int]:
    """How to read the items, and the bytes of the input (0 if unknown). `options` gets the folder of media."""
    from beheld.jobs.items import media_items, read_items
    from beheld.jobs.remote import is_remote, opener, without_key

    name = arguments.input
    path = Path(name).expanduser()
    if is_remote(name) and arguments.prompt is not None:
        raise ConfigError(
            f"A question about media at {without_key(name)!r} cannot be asked.",
            "Name a folder of this machine, or a .jsonl file.",
        )
    if is_remote(name) or (path.is_file() and arguments.prompt is None):
        for flag in ("max_tokens", "temperature"):
            if getattr(arguments, flag) is not None:
                words = f"--{flag.replace('_', '-')} is for media; each request of a file has its own."
                raise ConfigError(words, "Leave it out, or write it into the requests.", param=flag)
        if is_remote(name):
            open_, size = opener(name)
            return lambda: read_items(name, open_), size
        return lambda: read_items(path), path.stat().st_size
    folder, pattern = (path, "**/*") if path.is_dir() else _split(path)
    if not folder.is_dir() or (not glob.has_magic(str(path)) and not path.exists()):
        raise ConfigError(f"There is no file or folder {name!r}.", "Name a .jsonl file, a folder or a pattern.")
    if not arguments.prompt:
        raise ConfigError("Media need a question.", "Add --prompt QUESTION.", param="prompt")
    options.setdefault("allowed_local_media_path", str(folder.resolve()))
    more = {
        "max_tokens": 256 if arguments.max_tokens is None else arguments.max_tokens,
        "temperature": 0.0 if arguments.temperature is None else arguments.temperature,
    }
    return lambda: media_items(_media(folder, pattern), arguments.prompt, more), 0


def _split(path: Path) -> tuple[Path, str]:
    """The folder before a pattern, and the pattern within it."""
    parts = path.parts
    first = next((number for number, part in enumerate(parts) if glob.has_magic(part)), len(parts) - 1)
    return Path(*parts[:first]), str(Path(*parts[first:]))


def _media(folder: Path, pattern: str) -> Iterator[tuple[str, str, Path]]:
    """The media files below a folder: name, modality, path. Other files are left out of a folder, not of a pattern."""
    for found in glob.iglob(pattern, root_dir=folder, recursive=True):
        path = folder / found
        if path.is_file() and (pattern != "**/*" or path.suffix.lower() in _ENDINGS):
            yield found, modality_of(found), path


def summary(progress: Progress) -> str:
    """The last line of a job."""
    seconds = max(time.monotonic() - progress.begun, 1e-9)
    items = progress.answered + progress.failed
    tokens = progress.prompt_tokens + progress.output_tokens
    words = (
        f"beheld: {progress.answered:,} answered, {progress.failed:,} failed in {seconds:.1f} s "
        f"({items / seconds:.1f} items/s, {tokens / seconds:,.0f} tokens/s, {progress.output_tokens / seconds:,.0f} of "
        "them generated)"
    )
    if progress.malformed:
        words += f"; {progress.malformed:,} lines have not the form of a request"
    if progress.skipped:
        words += f"; {progress.skipped:,} were done before"
    if progress.unknown:
        words += f"; {progress.unknown:,} items of the output are not in the input"
    return words


class _ProgressLine:
    """A line of progress on a terminal; nothing if standard error is none.

    Args:
        size: bytes of the input; 0 if unknown.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._shows = sys.stderr.isatty()
        self._next = 0.0
        self._begun = False

    def __call__(self, progress: Progress) -> None:
        """Show the state, twice a second at most."""
        now = time.monotonic()
        if not self._shows or now < self._next:
            return
        self._next, self._begun = now + _SHOWN_S, True
        items = progress.answered + progress.failed
        share = f"{100 * progress.position / self._size:.0f} % read, " if self._size else ""
        rate = items / max(now - progress.begun, 1e-9)
        text = f"{share}{items + progress.skipped:,} done, {progress.failed:,} failed, {rate:.1f} items/s"
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        """End the line."""
        if self._begun:
            print(file=sys.stderr)
