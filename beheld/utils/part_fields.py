"""Which further fields of a message's part a chat template reads."""

from __future__ import annotations

import re

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


class PartFields:
    """The fields of parts that chat templates read: `part.name`, `part["name"]`, `part.get("name")`, `"name" in part`.

    Args:
        templates: their sources; those of strangers are only searched, in a time that their length bounds.
    """

    def __init__(self, *templates: str | None) -> None:
        self._templates = tuple(filter(None, templates))
        self._known: dict[str, bool] = {}

    def reads(self, name: str) -> bool:
        """True if a template reads a field of that name, which is none of those with a meaning of their own."""
        found = self._known.get(name)
        if found is None:
            found = self._searched(name)
            if found:
                # Others are refused at the first, and a client may think up any number.
                self._known[name] = True
        return found

    def _searched(self, name: str) -> bool:
        if name in _OTHERS or len(name) > _MAX_LETTERS or not (name.isascii() and name.isidentifier()):
            return False
        quoted = f"(?:'{name}'|\"{name}\")"
        forms = rf"\.{name}(?![\w(])|\[\s*{quoted}\s*\]|\.get\(\s*{quoted}|{quoted}\s+(?:not\s+)?in\b"
        return any(re.search(forms, template) for template in self._templates)
