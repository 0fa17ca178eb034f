"""`beheld bench serve`: load a server with rising numbers of clients; prints one JSON line, and draws the ladder."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from beheld.cli import load, plot, remote
from beheld.core.errors import ConfigError

# In pixels: images are generated before they are sent.
MAX_SIDE = 8192


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True)
    serve = kinds.add_parser("serve", help="a server that speaks OpenAI's API")
    serve.add_argument("--url", default="http://127.0.0.1:8000", help="of the server (default: %(default)s)")
    serve.add_argument("--api-key", help="of the server (or OPENAI_API_KEY)")
    serve.add_argument("--model", help="its name there; the first one by default")
    serve.add_argument("--clients", default="1,4,16,32", help="numbers of clients, one run each (default: %(default)s)")
    serve.add_argument("--requests", type=int, default=64, help="of each run, at least one per client (default: 64)")
    serve.add_argument("--tokens", type=int, default=32, help="of each answer (default: 32)")
    serve.add_argument("--side", type=int, default=224, help="of the images, in pixels; 0 sends none (default: 224)")
    serve.add_argument("--seed", type=int, default=0, help="of the images; the same seed again finds them cached")
    serve.add_argument("--plot", metavar="FILE.svg", help="write a plot of the ladder")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the ladder, draw it on standard error, print the JSON line, write the plot."""
    try:
        ladder = [int(word) for word in arguments.clients.split(",")]
    except ValueError:
        ladder = []
    if not ladder or min(ladder) < 1:
        raise ConfigError("--clients must be numbers above 0, as 1,4,16.", param="clients")
    if min(arguments.requests, arguments.tokens) < 1:
        raise ConfigError("--requests and --tokens must be above 0.", param="requests")
    if not 0 <= arguments.side <= MAX_SIDE:
        raise ConfigError(f"--side must be from 0 to {MAX_SIDE}.", param="side")
    if arguments.plot and Path(arguments.plot).suffix != ".svg":
        raise ConfigError("The plot is an SVG.", "Give a name that ends with .svg.", param="plot")
    if arguments.plot and not os.access(Path(arguments.plot).parent, os.W_OK | os.X_OK):
        raise ConfigError("The plot cannot be written there.", "Name another folder.", param="plot")
    at, key = remote.address(arguments.url), remote.key_of(arguments.api_key)
    with remote.connected(at, key) as client:
        first = remote.first_model(client)
    model = arguments.model or first
    steps = ", ".join(map(str, ladder))
    print(f"{model}: {arguments.requests} requests with each number of clients: {steps}", file=sys.stderr)
    lines = climb(at, key, model, ladder, arguments)
    report = {"url": at, "model": model, "tokens": arguments.tokens, "side": arguments.side, "ladder": lines}
    print(f"\n{plot.text(lines, shutil.get_terminal_size().columns)}\n", file=sys.stderr)
    print(json.dumps(report))
    if arguments.plot:
        what = f"{arguments.tokens} tokens" + (f", images of {arguments.side} pixels" if arguments.side else "")
        Path(arguments.plot).write_text(plot.svg(lines, what), encoding="utf-8")
    return 0 if all(line["requests"] for line in lines) else 1


def climb(url: str, key: str, model: str, ladder: list[int], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return one report per number of clients, after an unreported warm-up run.

    Raises:
        ConfigError: the server gives no answers.
    """

    def requests(count: int, step: int) -> list[bytes]:
        seed = 1000 * arguments.seed + step
        return list(load.bodies(count, arguments.tokens, arguments.side or None, model, seed))

    warm, _ = asyncio.run(load.closed_loop(url, key, requests(min(ladder[-1], 8), 999), min(ladder[-1], 8)))
    if not warm.total_s:
        wrong = ", ".join(warm.errors) or "it is busy"
        raise ConfigError(f"{url}/chat/completions gives no answers: {wrong}.", warm.said or "")
    lines = []
    for step, clients in enumerate(ladder):
        run = asyncio.run(load.closed_loop(url, key, requests(max(arguments.requests, clients), step), clients))
        lines.append(load.report(*run, clients))
        print(_words(lines[-1]), file=sys.stderr)
    return lines


def _words(line: dict[str, Any]) -> str:
    first, between = line["first_token_ms"], line["between_tokens_ms"]
    wrong = f", errors: {line['errors']}" if line["errors"] else ""
    return (
        f"{line['clients']:4d} clients: {line['tokens_per_s']:8.1f} tokens/s, first token {first['p50']:.0f} ms "
        f"(p99 {first['p99']:.0f}), between tokens {between['p50']:.1f} ms (p99 {between['p99']:.1f}){wrong}"
    )
