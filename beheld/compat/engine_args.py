"""EngineArgs as scripts use it: its flags in a parser of theirs, options made of what was parsed, and their sizes."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import fields
from types import SimpleNamespace
from typing import Any, Self, TypeVar

from beheld.core.config import EngineArgs
from beheld.core.vllm_options import OPTIONS
from beheld.flags.engine import add_engine_flags, spellings
from beheld.flags.json_values import json_or_text

P = TypeVar("P", bound=argparse.ArgumentParser)


class ScriptEngineArgs(EngineArgs):
    """EngineArgs with vLLM's methods for command lines and for what follows from options; also AsyncEngineArgs."""

    @staticmethod
    def add_cli_args(parser: P, async_args_only: bool = False) -> P:
        """Add a flag for each option of vLLM's engine; those that are not given have the options' defaults.

        Args:
            async_args_only: add none: no option is for servers only.
        """
        if async_args_only:
            return parser
        defaults = {field.name: field.default for field in fields(EngineArgs)}
        parser.add_argument("--model", default=None, help="a folder or a hub name")
        for action in add_engine_flags(parser, "+"):
            action.default = defaults[action.dest]
        group = parser.add_argument_group("options of vLLM that change nothing or are refused")
        for name, option in OPTIONS.items():
            if name.startswith("_"):
                continue
            reader: Callable[[str], Any] = json_or_text
            how: dict[str, Any] = {"type": reader} if option.values else {"action": argparse.BooleanOptionalAction}
            group.add_argument(*spellings(name), dest=name, default=None, help=argparse.SUPPRESS, **how)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """The options among the parsed arguments; arguments of the script itself are left out."""
        known = {field.name for field in fields(EngineArgs)} | set(OPTIONS)
        return cls(**{name: value for name, value in vars(args).items() if name in known})

    def create_engine_config(self, *_: Any, **__: Any) -> Any:
        """Return the sizes that programs read before they start an engine: of steps, and of groups of processes."""
        # It loads torch, and scripts that only read flags need none.
        from beheld.platform.registry import choose

        defaults = choose(self.device).defaults
        return SimpleNamespace(
            scheduler_config=SimpleNamespace(
                max_num_seqs=self.max_num_seqs or defaults.max_num_seqs,
                max_num_batched_tokens=self.max_num_batched_tokens or defaults.max_num_batched_tokens,
            ),
            parallel_config=SimpleNamespace(
                tensor_parallel_size=self.tensor_parallel_size,
                pipeline_parallel_size=self.pipeline_parallel_size,
                data_parallel_size=self.data_parallel_size,
            ),
        )
