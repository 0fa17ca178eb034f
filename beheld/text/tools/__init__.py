"""The formats in which models write tool calls, and their readers."""

from __future__ import annotations

from beheld.text.tools.call import Piece, Schemas, ToolReader, calls_of
from beheld.text.tools.formats import FORMATS, PLUGGED, CallFormat, form_of, format_named

__all__ = [
    "FORMATS",
    "PLUGGED",
    "CallFormat",
    "Piece",
    "Schemas",
    "ToolReader",
    "calls_of",
    "form_of",
    "format_named",
]
