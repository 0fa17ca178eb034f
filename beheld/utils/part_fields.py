"""Which further fields of a message's part a chat template reads."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cached_property

from beheld.utils.lru import LRU

# What messages, tools and the template's own objects have, and what parts hold for the model and not for the template.
_OTHERS = frozenset(
    (
        *("role", "content", "name", "tool_calls", "tool_call_id", "function", "arguments", "id", "parameters"),
        *("reasoning", "reasoning_content", "thinking", "refusal", "description", "properties", "required", "items"),
        *("enum", "index", "index0", "first", "last", "length", "previtem", "nextitem", "messages", "tools"),
        *("type", "text", "input_text", "output_text", "image", "image_url", "image_pil", "input_image"),
        *("image_embeds", "audio_embeds", "video_embeds", "prompt_embeds", "video", "video_url", "input_video"),
        *("audio", "audio_url", "input_audio", "file", "input_file", "file_data", "file_url", "file_id", "filename"),
        *("url", "path", "base64", "data", "uuid", "detail", "format", "cache_control", "pages", "dpi", "text_layer"),
        *("fps", "num_frames", "use_audio_in_video", "load_audio_from_video"),
    )
)
_MAX_LETTERS = 64
# No template for people reads as many; the fields after these are none.
_MAX_NAMES = 1024
# Blanks and names have bounds, so that no form is longer than the overlap of two steps.
_NAME = "[A-Za-z_][A-Za-z0-9_]" + f"{{0,{_MAX_LETTERS - 1}}}"
_QUOTED = rf"(?:'({_NAME})'|\"({_NAME})\")"
_FORMS = re.compile(
    rf"\.get\(\s{{0,64}}{_QUOTED}|\.({_NAME})(?![\w(])|\[\s{{0,64}}{_QUOTED}\s{{0,64}}\]"
    rf"|{_QUOTED}\s{{1,64}}(?:not\s{{1,64}})?in\b"
)
_OVERLAP = 512
# Letters that one step looks at: a search keeps the interpreter lock to its end.
_LETTERS_A_STEP = 1 << 14
_KEPT_BYTES, _ENTRY_BYTES, _NAME_BYTES = 8 << 20, 256, 192
_kept: LRU[str, frozenset[str]] = LRU(_KEPT_BYTES)


class PartFields:
    """The fields of parts that chat templates read: `part.name`, `part["name"]`, `part.get("name")`, `"name" in part`.

    Args:
        templates: their sources. Each is searched once, in steps between which other threads run.
    """

    def __init__(self, *templates: str | None) -> None:
        self._templates = tuple(filter(None, templates))

    def reads(self, name: str) -> bool:
        """True if a template reads a field of that name, which is none of those with a meaning of their own."""
        return name not in _OTHERS and any(name in names for names in self._names)

    @cached_property
    def _names(self) -> tuple[frozenset[str], ...]:
        return tuple(map(_names_in, self._templates))


def _names_in(template: str) -> frozenset[str]:
    """The names of all fields that a template reads, of whatever."""
    names = _kept.get(template)
    if names is None:
        found: set[str] = set()
        for name in _each_name(template):
            found.add(name)
            if len(found) == _MAX_NAMES:
                break
        names = frozenset(found)
        _kept.put(template, names, _ENTRY_BYTES + 4 * len(template) + _NAME_BYTES * len(names))
    return names


def _each_name(template: str) -> Iterator[str]:
    for start in range(0, len(template), _LETTERS_A_STEP):
        end = start + _LETTERS_A_STEP
        for match in _FORMS.finditer(template, start, end + _OVERLAP):
            if match.start() >= end:
                # The next step sees it whole.
                break
            yield match[match.lastindex or 0]
