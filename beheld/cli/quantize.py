"""`beheld quantize MODEL OUT [MEDIA...]`: writes a checkpoint in fewer bits."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

from beheld.cli.flags import engine_options
from beheld.cli.media import references
from beheld.flags.engine import add_engine_flags

_OPTIONS = frozenset(
    (
        *("tokenizer", "tokenizer_mode", "trust_remote_code", "revision", "tokenizer_revision", "download_dir"),
        *("hf_token", "hf_overrides", "mm_processor_kwargs"),
    )
)
_METHODS = {
    "int8": "8 bits and a scale for each output (W8A8)",
    "int4": "4 bits and a scale for each group of inputs (W4A16), each weight to the nearest number",
    "gptq": "as int4, and weights of later inputs correct the errors of earlier ones; needs files or a question",
    "awq": "4 bits in AWQ's layout; weights of large inputs are rounded less; needs files or a question",
    "gguf": "one GGUF file, which llama.cpp and others read; OUT is its name, --type the type of its weights",
}
_CALIBRATED = ("gptq", "awq")
# Other names of methods.
_ALSO = {"gptq-like": "gptq", "gguf-readable": "gguf"}
_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("model", metavar="MODEL", help="a folder, a hub name, or mote")
    parser.add_argument("out", metavar="OUT", help="the folder (or GGUF file) to write, which must not exist")
    parser.add_argument("media", nargs="*", metavar="MEDIA", help="files to calibrate by: images, videos, audio")
    parser.add_argument(
        "--method",
        choices=[*_METHODS, *_ALSO],
        default="int4",
        help="; ".join(f"{name}: {words}" for name, words in _METHODS.items()) + " (default: %(default)s)",
    )
    parser.add_argument(
        "--type",
        type=str.lower,
        help=f"of a GGUF file's weights: {', '.join(_TYPES)}; types with K and IQ are not written (default: q8_0)",
    )
    parser.add_argument("--question", action="append", help="what is asked to calibrate; may be repeated")
    parser.add_argument(
        "--max-tokens", type=int, default=32, help="tokens of answers to calibrate by (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_engine_flags(parser, names=_OPTIONS)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write and tell."""
    from pathlib import Path

    refs = references(arguments.media)
    from beheld.core.config import EngineArgs
    from beheld.core.errors import UserError
    from beheld.tools.quantize import quantize, write_file
    from beheld.tools.verify.questions import question_of

    options: dict[str, Any] = {"dtype": "float32", "device": "cpu", **engine_options(arguments)}
    args = EngineArgs(model=arguments.model, **options)
    method = _ALSO.get(arguments.method, arguments.method)
    if method not in _CALIBRATED and (refs or arguments.question):
        raise UserError(
            f"The method {method!r} calibrates by nothing.",
            f"Leave files and questions out, or add --method {_CALIBRATED[0]}.",
        )
    if method == "gguf":
        _tell(write_file(args, Path(arguments.out), arguments.type or "q8_0"), arguments.json)
        return 0
    if arguments.type is not None:
        raise UserError("--type is of GGUF files.", "Leave it out, or add --method gguf.")
    # Each file is asked about by itself, with each of the questions.
    asked = arguments.question or ([None] if refs else [])
    questions = [
        question_of(args, each, text=text, prompt=None, max_tokens=arguments.max_tokens)
        for each in ([[ref] for ref in refs] or [[]])
        for text in asked
    ]
    _tell(quantize(args, Path(arguments.out), method, questions), arguments.json)
    return 0


def _tell(made: Any, as_json: bool) -> None:
    print(json.dumps(dataclasses.asdict(made)) if as_json else made)
