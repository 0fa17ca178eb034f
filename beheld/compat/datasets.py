"""Prompts to measure with, as vLLM's benchmark scripts ask for them: random tokens, or the user's own file.

Of vLLM's data sets, those that are downloaded are left out.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from beheld.compat.prompts import MultiModalDataDict
from beheld.core.errors import ConfigError
from beheld.core.request import LoRARequest

NAMES = ("random", "custom", "sharegpt")


@dataclass
class SampleRequest:
    """One prompt to measure with.

    Attributes:
        prompt_len: its length in tokens.
        expected_output_len: how many tokens the answer should have.
    """

    prompt: str
    prompt_len: int
    expected_output_len: int
    multi_modal_data: MultiModalDataDict | None = None
    lora_request: LoRARequest | None = None
    request_id: str | None = None


def add_dataset_parser(parser: argparse.ArgumentParser) -> None:
    """Add the flags that `get_samples` reads."""
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num-prompts", type=int, default=1000, help="how many prompts")
    parser.add_argument("--dataset-name", default="random", help=f"one of {', '.join(NAMES)}")
    parser.add_argument("--dataset-path", default=None, help="the file of custom (JSON lines) or sharegpt (JSON)")
    parser.add_argument("--skip-chat-template", action="store_true", help="take custom prompts as they are")
    parser.add_argument("--disable-shuffle", action="store_true", help="take the prompts of a file in order")
    parser.add_argument("--no-oversample", action="store_true", help="take each prompt of a file once at most")
    parser.add_argument("--custom-output-len", type=int, default=256)
    parser.add_argument("--sharegpt-output-len", type=int, default=None)
    parser.add_argument("--random-input-len", type=int, default=1024)
    parser.add_argument("--random-output-len", type=int, default=128)
    parser.add_argument("--random-range-ratio", type=float, default=0.0, help="lengths differ by this part of them")
    parser.add_argument("--random-prefix-len", type=int, default=0, help="tokens that all prompts begin with")


def get_samples(args: argparse.Namespace, tokenizer: Any) -> list[SampleRequest]:
    """The prompts that the parsed flags ask for.

    Raises:
        ConfigError: there is no such data set, or its file cannot be read.
    """
    rng = random.Random(args.seed)
    if args.dataset_name == "random":
        return list(_random(args, tokenizer, rng))
    if args.dataset_name not in NAMES:
        raise ConfigError(
            f"The data set {args.dataset_name!r} is not available here.",
            f"Use one of {', '.join(NAMES)}: `--dataset-name custom --dataset-path FILE` takes your own prompts.",
            param="dataset_name",
        )
    given = list(_read(args, tokenizer))
    if not given:
        raise ConfigError(f"{args.dataset_path} holds no prompts.", "Name another file.", param="dataset_path")
    if not args.disable_shuffle:
        rng.shuffle(given)
    count = min(args.num_prompts, len(given)) if args.no_oversample else args.num_prompts
    return [given[number % len(given)] for number in range(count)]


def _random(args: argparse.Namespace, tokenizer: Any, rng: random.Random) -> Iterator[SampleRequest]:
    """Prompts of tokens that are no special ones."""
    special = set(tokenizer.all_special_ids)
    ids = [token for token in range(len(tokenizer)) if token not in special]
    prefix = rng.choices(ids, k=args.random_prefix_len)
    for number in range(args.num_prompts):
        length, answer = (
            max(1, round(one * (1 + rng.uniform(-1, 1) * args.random_range_ratio)))
            for one in (args.random_input_len, args.random_output_len)
        )
        text = tokenizer.decode([*prefix, *rng.choices(ids, k=length)])
        yield SampleRequest(text, len(prefix) + length, answer, request_id=str(number))


def _read(args: argparse.Namespace, tokenizer: Any) -> Iterator[SampleRequest]:
    """The prompts of a file.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        text = Path(args.dataset_path or "").read_text(encoding="utf-8")
        entries = json.loads(text) if args.dataset_name == "sharegpt" else map(json.loads, text.splitlines())
        for number, entry in enumerate(entries):
            if args.dataset_name == "custom":
                prompt, answer = entry["prompt"], args.custom_output_len
                if not args.skip_chat_template and not getattr(args, "custom_skip_chat_template", False):
                    turns = [{"role": "user", "content": prompt}]
                    prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
            else:
                if len(entry.get("conversations", ())) < 2:
                    continue
                prompt, reply = (turn["value"] for turn in entry["conversations"][:2])
                answer = args.sharegpt_output_len or len(tokenizer(reply).input_ids)
            yield SampleRequest(prompt, len(tokenizer(prompt).input_ids), answer, request_id=str(number))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"The data set {args.dataset_path!r} cannot be read.",
            'custom is JSON lines with {"prompt": text}, sharegpt a JSON list with "conversations".',
            param="dataset_path",
            detail=str(error),
        ) from error
