"""How models write tool calls into their text, and how they are read out of it."""

from __future__ import annotations

from beheld.text.tools.call import Call, ToolReader
from beheld.text.tools.hermes import HermesReader
from beheld.text.tools.json_form import JsonReader

READERS: dict[str, type[HermesReader] | type[JsonReader]] = {"hermes": HermesReader, "json": JsonReader}

__all__ = ["READERS", "Call", "ToolReader", "form_of"]


def form_of(template: str | None) -> str | None:
    """The form that a chat template teaches its model; None if it tells of none."""
    if template is None:
        return None
    if "<tool_call>" in template:
        return "hermes"
    return "json" if '"parameters": ' in template and "tools" in template else None
