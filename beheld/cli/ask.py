"""`beheld ask MEDIA... QUESTION`: the answer on standard output, everything else on standard error."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from beheld.cli.flags import engine_options
from beheld.cli.media import check_question, content, references
from beheld.flags.engine import add_engine_flags
from beheld.mote import NOTHING, UNKNOWN
from beheld.utils.gc_tuning import paused_collector

if TYPE_CHECKING:
    from beheld.api.llm import LLM
    from beheld.core.outputs import RequestOutput
    from beheld.core.params import SamplingParams


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("words", nargs="+", metavar="MEDIA... QUESTION", help="files, URLs or -; then the question")
    parser.add_argument(
        "-m", "--model", help="a folder, a GGUF file, a hub name or a short name; without it the embedded model answers"
    )
    parser.add_argument("--max-tokens", type=int, default=256, help="longest answer, in tokens (default: 256)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest token (default: 0)")
    # --json prints the whole answer at once, so it cannot be combined with --stream.
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON object with the answer, usage and receipts")
    form.add_argument("--stream", action="store_true", help="print the answer as it grows")
    parser.add_argument("--receipts", action="store_true", help="print to standard error what the model saw")
    add_engine_flags(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Ask, and print the answer."""
    # Before libraries load, for it may refuse a count.
    options = {"max_num_seqs": 1, "use_tqdm_on_load": False, **engine_options(arguments)}
    with paused_collector():
        from beheld.api.llm import LLM
        from beheld.core.params import SamplingParams

    *media, question = arguments.words
    check_question(question)
    refs = references(media, "The last argument of `beheld ask` is the question; all others are media.")
    params = SamplingParams(temperature=arguments.temperature, max_tokens=arguments.max_tokens)
    messages = [{"role": "user", "content": [*content(refs), {"type": "text", "text": question}]}]
    with LLM(arguments.model, **options) as llm:
        output = _streamed(llm, messages, params) if arguments.stream else _whole(llm, messages, params)
    if arguments.json:
        print(json.dumps(_summary(output), ensure_ascii=False))
    elif not arguments.stream:
        print(output.outputs[0].text)
    if arguments.receipts:
        for receipt in output.media:
            print(json.dumps(receipt.to_json(), ensure_ascii=False), file=sys.stderr)
    for loss, items in _losses(output).items():
        print(f"note: {items}: {loss}", file=sys.stderr)
    if output.outputs[0].finish_reason == "length":
        print("note: the answer was cut at --max-tokens.", file=sys.stderr)
    if output.outputs[0].text in (UNKNOWN, NOTHING):
        from beheld.tools.fits import command_for_photographs

        print(f"note: {command_for_photographs('beheld ask -m')} ...", file=sys.stderr)
    return 0


def _whole(llm: LLM, messages: list[dict[str, Any]], params: SamplingParams) -> RequestOutput:
    return llm.chat(messages, params, use_tqdm=False)[0]


def _streamed(llm: LLM, messages: list[dict[str, Any]], params: SamplingParams) -> RequestOutput:
    last = None
    for piece in llm.chat_stream(messages, params):
        sys.stdout.write(piece.outputs[0].text)
        sys.stdout.flush()
        last = piece
    print()
    assert last is not None
    return last


def _losses(output: RequestOutput) -> dict[str, str]:
    """Return what was lost, and of which items: the pages of a document often lose the same."""
    found: dict[str, list[str]] = {}
    for receipt in output.media:
        for loss in receipt.lost:
            found.setdefault(loss, []).append(receipt.item)
    return {loss: ", ".join(items) if len(items) < 5 else _first_of(items) for loss, items in found.items()}


def _first_of(items: list[str]) -> str:
    return f"{items[0]} and {len(items) - 1} more"


def _summary(output: RequestOutput) -> dict[str, Any]:
    answer = output.outputs[0]
    return {
        "answer": answer.text,
        "finish_reason": answer.finish_reason,
        "usage": {
            "prompt_tokens": output.usage.prompt_tokens,
            "completion_tokens": output.usage.completion_tokens,
            "cached_tokens": output.usage.cached_tokens,
        },
        "media": [receipt.to_json() for receipt in output.media],
        "milliseconds": {k: round(v, 1) for k, v in output.milliseconds.items()},
    }
