"""Schema violations in words for the client, who may not know Python."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from beheld.server import limits
from beheld.server.errors import HttpError

# The schema's own errors, which are complete sentences: see `schema.wrong`.
_OWN = "invalid_value"
# pydantic's type errors -> what the value must be, and what to send.
_KINDS = {
    "string_type": ("a text", "Send a text."),
    "int_type": ("a whole number", "Send a whole number, not as a text."),
    "float_type": ("a number", "Send a number, not as a text."),
    "finite_number": ("a finite number", "Send a smaller one."),
    "bool_type": ("true or false", "Send true or false."),
    "list_type": ("a list", "Send a list."),
    "dict_type": ("an object", "Send an object."),
    "model_type": ("an object", "Send an object."),
    "model_attributes_type": ("an object", "Send an object."),
    "literal_error": ("{expected}", "Send one of these."),
    "greater_than_equal": ("at least {ge}", "Send a larger one."),
    "less_than": ("less than {lt}", "Send a smaller one."),
    "less_than_equal": ("at most {le}", "Send a smaller one."),
}
# pydantic's other errors -> what is wrong, and what to do.
_OTHERS = {
    "missing": ("is missing", "It must be given."),
    "too_long": ("has more than {max_length} entries", "Send fewer."),
    "too_short": ("has no entry", "Send at least one."),
    "string_too_long": ("has more than {max_length} characters", "Send a shorter text."),
    "string_too_short": ("is empty", "Send a text that is not empty."),
    "string_pattern_mismatch": ("must match {pattern}", "Use these characters only."),
    "union_tag_invalid": ("is of an unknown type", "Send one of {expected_tags}."),
    "union_tag_not_found": ("has no type", "Add its type."),
}


def validation_error(error: ValidationError, value: Any) -> HttpError:
    """The error to report: the deepest one, because of several alternatives the one that matched furthest was meant.

    At the same place, an error inside the right type wins; if no type matches, the message lists all.
    """
    found = [(_path(entry, value), entry) for entry in error.errors(include_url=False, include_input=False)]
    path, chosen = max(
        found, key=lambda pair: (len(pair[0]), not pair[1]["type"].endswith("_type"), len(pair[1]["loc"]))
    )
    param = ".".join(map(str, path))[: limits.MAX_NAME] or None
    if chosen["type"] == "unknown_field":
        return HttpError(400, chosen["msg"], chosen["ctx"]["remedy"], param=param, code="unknown_field")
    reason, remedy = _message(chosen, [entry for place, entry in found if place == path])
    if chosen["type"] == "greater_than_equal" and isinstance(path[-1], int) and chosen["ctx"]["ge"] == 0:
        # Only token ids stand in lists of such numbers.
        reason += "; a token id below it is out of vocabulary"
    joint = ": " if chosen["type"] == _OWN else " "
    return HttpError(400, f"{param or 'The body'}{joint}{reason}.", remedy, param=param, code="invalid_value")


def _message(chosen: Any, alike: list[Any]) -> tuple[str, str]:
    """What is wrong, as a continuation of the field's name, and what to do."""
    kind, context = chosen["type"], chosen.get("ctx", {})
    if kind in _KINDS:
        kinds = [_KINDS[entry["type"]][0].format(**entry.get("ctx", {})) for entry in alike if entry["type"] in _KINDS]
        return "must be " + " or ".join(dict.fromkeys(kinds)), _KINDS[kind][1]
    if kind in _OTHERS:
        words, remedy = _OTHERS[kind]
        return words.format(**context), remedy.format(**context)
    if kind == _OWN:
        return chosen["msg"].rstrip("."), context["remedy"]
    return "does not fit", "Send another value, or leave it out."


# How pydantic calls lists of parts, whose type may be found before they are read.
_TAGGED = ("list[tagged-union", "list[function-before[_typed(), tagged-union")


def _path(entry: Any, value: Any) -> list[str | int]:
    """The path of an error in the client's JSON, without the alternatives and classes that pydantic went through."""
    path: list[str | int] = []
    loc = entry["loc"]
    for place, part in enumerate(loc):
        if place > 1 and str(loc[place - 2]).startswith(_TAGGED):
            # The tag of a part, which may also be one of its keys.
            continue
        # So is this, where content is always a list.
        of_content = place > 1 and loc[place - 2] == "content" and isinstance(loc[place - 1], int)
        if of_content and isinstance(value, dict) and part == value.get("type", part):
            continue
        inside = isinstance(value, dict) and isinstance(part, str) and part in value
        if inside or (isinstance(value, list) and isinstance(part, int) and part < len(value)):
            path.append(part)
            value = value[part]
    if entry["type"] == "missing" and isinstance(entry["loc"][-1], str):
        path.append(entry["loc"][-1])
    if entry["type"] == "unknown_field":
        path.append(entry["ctx"]["name"])
    return path
