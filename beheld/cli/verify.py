"""`beheld verify MODEL [PICTURE...]`: transformers and beheld on the same input, and the first stage that differs."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from beheld.core.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("model", metavar="MODEL", help="a folder, a hub name, or mote")
    parser.add_argument("pictures", nargs="*", metavar="PICTURE", help="picture files; without any, a made-up one")
    parser.add_argument("--text-only", action="store_true", help="ask without pictures")
    parser.add_argument("--question", default="What is in this picture?", help="for the chat template")
    parser.add_argument("--prompt", help="the whole prompt with the family's markers, instead of a question")
    parser.add_argument("--max-tokens", type=int, default=12, help="tokens to answer (default: %(default)s)")
    parser.add_argument("--dtype", default="float32", help="type of both models (default: %(default)s)")
    parser.add_argument("--trust-remote-code", action="store_true")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Compare and print; the status is 1 if a stage differs."""
    import os

    os.environ.setdefault("BEHELD_LOG_LEVEL", "WARNING")
    from beheld.core.config import EngineArgs
    from beheld.verify.run import verify
    from beheld.verify.trace import Question

    missing = [name for name in arguments.pictures if not Path(name).is_file()]
    if missing:
        raise UserError(f"There is no file {missing[0]!r}.")
    images: list[Any] = [Path(name) for name in arguments.pictures]
    if not images and not arguments.text_only:
        from beheld.verify.run import made_up

        images = made_up(1 if arguments.prompt is None else 0)
    question = Question(
        text=arguments.question if arguments.prompt is None else arguments.prompt,
        images=() if arguments.text_only else tuple(images),
        templated="chat" if arguments.prompt is None else "plain",
        max_tokens=arguments.max_tokens,
    )
    args = EngineArgs(
        model=None if arguments.model == "mote" else arguments.model,
        dtype=arguments.dtype,
        trust_remote_code=arguments.trust_remote_code,
    )
    stages, culprit = verify(args, question)
    if arguments.json:
        told = None if culprit is None else culprit.name
        print(json.dumps({"first_difference": told, "stages": [dataclasses.asdict(stage) for stage in stages]}))
    else:
        for stage in stages:
            print(f"{stage.name:24s} {stage.verdict:13s} {stage.detail}")
        print("No stage differs." if culprit is None else f"The first stage that differs: {culprit.name}.")
    return 0 if culprit is None else 1
