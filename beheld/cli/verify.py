"""`beheld verify MODEL [MEDIA...]`: transformers and beheld on the same input, and the first stage that differs."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

from beheld.cli.flags import engine_options
from beheld.cli.media import references
from beheld.core.errors import BeheldError, UserError
from beheld.flags.engine import add_engine_flags

# Options that both sides follow or that must not change an answer; others do not apply.
_OPTIONS = frozenset(
    (
        *("tokenizer", "tokenizer_mode", "trust_remote_code", "revision", "tokenizer_revision", "download_dir"),
        *("hf_token", "hf_overrides", "dtype", "quantization", "max_model_len", "max_num_batched_tokens", "block_size"),
        *("num_gpu_blocks_override", "kv_cache_dtype", "limit_mm_per_prompt", "mm_processor_kwargs", "media_io_kwargs"),
    )
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("model", metavar="MODEL", help="a folder, a GGUF file, a hub name, or mote")
    parser.add_argument(
        "media", nargs="*", metavar="MEDIA", help="files: images, videos, audio; without any, one is generated"
    )
    parser.add_argument(
        "--unquantized", metavar="MODEL", help="tell what MODEL's quantized form loses, in place of comparing stages"
    )
    parser.add_argument("--text-only", action="store_true", help="ask without media")
    asked = parser.add_mutually_exclusive_group()
    asked.add_argument("--question", help="for the chat template, if there is one")
    asked.add_argument("--prompt", help="the whole prompt with the family's placeholders, instead of a question")
    parser.add_argument("--max-tokens", type=int, default=12, help="tokens to answer (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_engine_flags(parser, names=_OPTIONS)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Compare and print; the status is 1 if a stage differs. Print what rounding loses where weights are
    quantized at load or keys and values are rounded."""
    if arguments.max_tokens < 1:
        raise UserError(f"--max-tokens must be at least 1, got {arguments.max_tokens}.")
    refs = references(arguments.media)
    for name, ref in zip(arguments.media, refs, strict=True):
        if isinstance(ref.source, str | bytes):
            raise UserError(f"{name!r} is no file.", "Fetch it first: both sides must be given the same.")
    if refs and arguments.text_only:
        raise UserError("--text-only was said, and media were given.", "Leave one of the two out.")
    from beheld.core.config import EngineArgs
    from beheld.tools.verify.questions import made_up_of, question_of
    from beheld.tools.verify.run import is_rounded_at_load, quantization_loss, rounds_cache, verify

    options: dict[str, Any] = {"dtype": "float32", **engine_options(arguments)}
    args = EngineArgs(model=arguments.model, **options)
    if not refs and not arguments.text_only and arguments.prompt is None:
        refs = made_up_of(args)
    question = question_of(
        args, refs, text=arguments.question, prompt=arguments.prompt, max_tokens=arguments.max_tokens
    )
    if arguments.unquantized is not None or is_rounded_at_load(args) or rounds_cache(args):
        # The stages of the same weights unquantized are compared without the option.
        lost = quantization_loss(args, question, arguments.unquantized)
        print(json.dumps({**dataclasses.asdict(lost), "share_equal": lost.share_equal}) if arguments.json else lost)
        return 0
    try:
        stages, culprit = verify(args, question)
    except BeheldError as error:
        if arguments.json:
            # A program that reads the report learns that nothing was compared.
            print(json.dumps({"first_difference": None, "stages": [], "error": str(error)}))
        raise
    if arguments.json:
        first = None if culprit is None else culprit.name
        print(json.dumps({"first_difference": first, "stages": [dataclasses.asdict(stage) for stage in stages]}))
    else:
        for stage in stages:
            print(f"{stage.name:24s} {stage.verdict:13s} {stage.detail}")
        print("No stage differs." if culprit is None else f"The first stage that differs: {culprit.name}.")
    return 0 if culprit is None else 1
