"""Validates a checkpoint's files once, at start: each file in one place, with file, key and remedy in the error."""

from __future__ import annotations

from pathlib import Path

from beheld.checkpoint.checks import processor
from beheld.checkpoint.checks.config import check_config
from beheld.checkpoint.checks.generation import check_generation
from beheld.checkpoint.checks.tokenizer import check_tokenizer
from beheld.checkpoint.files import CONFIG, GENERATION, read_json
from beheld.checkpoint.resolve import resolve_tokenizer
from beheld.checkpoint.secondary import secondary_weights
from beheld.core.config import EngineArgs


def validate(path: Path, args: EngineArgs) -> None:
    """Check all files of the checkpoint in `path` but the weights, which may not be there yet.

    Raises:
        ModelError: a file is broken, or says what no model of it can be.
    """
    check_config(read_json(path / CONFIG))
    for part in secondary_weights(path, args):
        check_config(read_json(Path(part.path) / CONFIG))
    if args.generation_config != "vllm":
        check_generation(read_json(path / GENERATION))
    for file in processor.FILES:
        processor.check_processor(file, read_json(path / file))
    if not args.skip_tokenizer_init:
        check_tokenizer(resolve_tokenizer(args, path))
