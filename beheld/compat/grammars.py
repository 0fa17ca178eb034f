"""GuidedDecodingParams, the older name and form of StructuredOutputsParams."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from beheld.core.params import StructuredOutputs


@dataclass
class GuidedDecodingParams(StructuredOutputs):
    """A grammar, with what chose among vLLM's backends: it changes nothing, as llguidance compiles all grammars."""

    backend: str | None = None
    backend_was_auto: bool = False
    disable_fallback: bool = False
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None

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
