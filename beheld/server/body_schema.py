"""What all bodies of requests have in common: types of fields, and how unknown fields are judged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from beheld.core.value_checks import nearest
from beheld.server import limits
from beheld.server.notes import Notes

Number = Annotated[float, Field(allow_inf_nan=False)]


Whole = Annotated[int, Field(ge=-(2**63), lt=2**64)]


# Lists stop at their first error: a list with a hundred thousand wrong entries gives one error.
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


# Token ids that are checked in one step, which keeps the interpreter lock: half a million would keep it for 17 ms.
_IDS_A_STEP = 16_384


def _in_steps(given: Any, check: ValidatorFunctionWrapHandler) -> Any:
    """`check` a long list in steps between which other threads run."""
    if not isinstance(given, list) or len(given) <= _IDS_A_STEP:
        return check(given)
    checked: list[int] = []
    for start in range(0, len(given), _IDS_A_STEP):
        try:
            checked += check(given[start : start + _IDS_A_STEP])
        except ValidationError:
            # Once more from the beginning, so that the error names the entry's place in the whole list.
            return check(given)
    return checked


Ids = Annotated[list[TokenId], Field(fail_fast=True), WrapValidator(_in_steps)]


Name = Annotated[str, Field(max_length=limits.MAX_NAME)]


_StopText = Annotated[str, Field(max_length=limits.MAX_STOP_LENGTH)]


Stop = Annotated[list[_StopText], Field(max_length=limits.MAX_STOPS, fail_fast=True)]


class Body(BaseModel):
    """A request body or a part of one. Types are strict: no number from a text or a boolean.

    A field that OpenAI has and this server lacks is accepted if it asks for nothing: null, or a value that holds here
    anyway (`says_nothing`). So a client can send back the objects that it received. A field that cannot change an
    answer here is accepted with any value and noted (`without_effect`), unless the operator wants it refused; the
    validation's context holds the notes.

    What checks a body is made when the first one is checked, or by `model_rebuild`: each class takes milliseconds, and
    parts of a body need none of their own.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, defer_build=True)

    says_nothing: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    without_effect: ClassVar[Mapping[str, str]] = {}
    remedies: ClassVar[Mapping[str, str]] = {}
    # The words about a field that nobody knows, if such are accepted: those without a remedy, and near no known name.
    foreign: ClassVar[str] = ""
    # The words about a field that is refused, as a format of its name.
    refused: ClassVar[str] = "The field {} is unknown."

    @model_validator(mode="before")
    @classmethod
    def _known(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse the first unknown field by name, before other checks; drop the fields that ask for nothing."""
        if not isinstance(value, dict):
            return value
        allows = cls.model_config.get("extra") == "allow"
        known = {field.alias or name for name, field in cls.model_fields.items()}
        notes = info.context if isinstance(info.context, Notes) else Notes()
        silent = set()
        for name, sent in value.items():
            if name in known:
                if name in cls.without_effect and sent is not None and not notes.strict:
                    notes.tell(name, cls.without_effect[name])
                continue
            if name in cls.says_nothing and any(sent is one or sent == one for one in (None, *cls.says_nothing[name])):
                silent.add(name)
                continue
            if name in cls.without_effect and not notes.strict:
                notes.tell(name, cls.without_effect[name])
                silent.add(name)
                continue
            if allows:
                continue
            if cls.foreign and notes.fields.get(name) == cls.foreign:
                silent.add(name)
                continue
            remedy = cls.remedies.get(name) or nearest(name, known, 0.8 if cls.foreign else 0.6)
            if cls.foreign and not remedy and not notes.strict and len(notes.fields) < limits.MAX_NOTES:
                notes.tell(name[:64], cls.foreign, foreign=True)
                silent.add(name)
                continue
            remedy = remedy or "Leave it out."
            # Braces would be taken for format fields.
            shown = repr(name[:64]).replace("{", "(").replace("}", ")")
            raise PydanticCustomError("unknown_field", cls.refused.format(shown), {"name": name[:64], "remedy": remedy})
        return {name: sent for name, sent in value.items() if name not in silent} if silent else value


def wrong(reason: str, remedy: str) -> PydanticCustomError:
    """A validation error with what to do about it."""
    return PydanticCustomError("invalid_value", reason, {"remedy": remedy})


CACHED = {
    "cache_control": "Prefixes are cached by their content, without marks.",
    "prompt_cache_breakpoint": "Prefixes are cached by their content, without marks.",
}
