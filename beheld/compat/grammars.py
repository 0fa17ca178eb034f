"""Grammars as vLLM's scripts give them, with what they say to its backends; here llguidance compiles all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from beheld.core.structured_outputs import StructuredOutputs


@dataclass
class StructuredOutputsConfig:
    """What vLLM's engine compiles grammars with; see core/vllm_options.py for what has no effect."""

    backend: str = "auto"
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    reasoning_parser: str = ""
    reasoning_parser_plugin: str = ""
    enable_in_reasoning: bool = False


@dataclass
class StructuredOutputsParams(StructuredOutputs):
    """A grammar. JSON has at most one space between tokens, whatever the options of whitespace say."""

    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    disable_fallback: bool = False
    whitespace_pattern: str | None = None


@dataclass
class GuidedDecodingParams(StructuredOutputsParams):
    """The older name and form of StructuredOutputsParams, with what chose among vLLM's backends."""

    backend: str | None = None
    backend_was_auto: bool = False

    @classmethod
    def from_optional(
        cls,
        json: Any = None,
        regex: str | None = None,
        choice: list[str] | None = None,
        grammar: str | None = None,
        json_object: bool | None = None,
        **options: Any,
    ) -> GuidedDecodingParams | None:
        """Build from keywords; None if none of them is given. `json` may be a class of pydantic."""
        if all(each is None for each in (json, regex, choice, grammar, json_object, options.get("structural_tag"))):
            return None
        schema = json.model_json_schema() if json is not None and hasattr(json, "model_json_schema") else json
        kept = {name: value for name, value in options.items() if value is not None}
        return cls(json=schema, regex=regex, choice=choice, grammar=grammar, json_object=json_object, **kept)
