"""The request schemas of /v1/systemone and /v1/decisions: questions with given answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from beheld.core.params import RawParams, SamplingParams
from beheld.server import limits
from beheld.server.body_schema import Body, Name, wrong
from beheld.server.parts_schema import PlainParts
from beheld.server.schema import WITHOUT_EFFECT, ChatRequest, Variables
from beheld.utils.bounded_json import exceeds

MAX_QUESTIONS = 64
# The labels of a choice are the letters from A to Z, those of a score the digits.
MAX_CHOICES = 26
MAX_LEVELS = 10
_JOINT = {"joint": "Leave it out: each question is answered by itself."}
_NO_JOINT: Mapping[str, tuple[Any, ...]] = {"joint": (False,)}
_Urls = Annotated[list[str], Field(max_length=limits.MAX_PARTS, fail_fast=True)]
_Salt = Annotated[str, Field(min_length=1, max_length=limits.MAX_NAME)]
_Question = Annotated[str, Field(max_length=limits.MAX_REPEATED_LETTERS)]


def _bounded_state(given: Any) -> Any:
    """The state, unless it is too large to be written as JSON in one step; a text needs no writing."""
    if not isinstance(given, str) and exceeds(given, limits.MAX_REPEATED_LETTERS, limits.MAX_REPEATED_VALUES):
        words = f"more than {limits.MAX_REPEATED_LETTERS} letters or {limits.MAX_REPEATED_VALUES} values"
        raise wrong(f"The state has {words}", "Send a smaller one, or one text.")
    return given


class SystemOneQuestion(Body):
    """A question of /v1/systemone; `criteria` are its answers."""

    refused = "The question has unknown field(s): {}."

    type: Literal["choice", "noul", "score"]
    instructions: _Question | None = None
    criteria: Any = None


class SystemOneRequest(Body):
    """POST /v1/systemone."""

    says_nothing = _NO_JOINT
    remedies = _JOINT
    without_effect: ClassVar[Mapping[str, str]] = {"request_id": WITHOUT_EFFECT["request_id"]}

    state: Annotated[Any, BeforeValidator(_bounded_state)]
    questions: Annotated[dict[str, SystemOneQuestion], Field(min_length=1)]
    instructions: str | None = None
    images: _Urls | None = None
    audio: _Urls | None = None
    videos: _Urls | None = None
    chat_template_kwargs: Variables | None = None
    model: Name | None = None
    cache_salt: _Salt | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None


class Predicate(Body):
    """Whether something is so."""

    type: Literal["predicate"]
    instructions: _Question
    name: Name | None = None


class DecisionOption(Body):
    """One answer of a choice."""

    value: Name | bool
    description: _Question = ""


def _distinct(given: list[DecisionOption]) -> list[DecisionOption]:
    # True is no "True".
    if len({(type(one.value), one.value) for one in given}) < len(given):
        raise wrong("Values of choices must be distinct", "Send each once.")
    return given


class DecisionChoice(Body):
    """Which of several answers fits best."""

    type: Literal["choice"]
    instructions: _Question
    name: Name | None = None
    choices: Annotated[
        list[DecisionOption], Field(min_length=2, max_length=MAX_CHOICES, fail_fast=True), AfterValidator(_distinct)
    ]


class DecisionLevel(Body):
    """One level of a scale."""

    label: Name
    description: _Question = ""


class DecisionScore(Body):
    """Where on a scale something is."""

    type: Literal["score"]
    instructions: _Question
    name: Name | None = None
    levels: Annotated[list[DecisionLevel], Field(min_length=2, max_length=MAX_LEVELS, fail_fast=True)]


class DecisionMessage(Body):
    """A message about which questions are asked."""

    says_nothing: ClassVar[Mapping[str, tuple[Any, ...]]] = {"type": ("message",)}

    role: Literal["user"]
    content: str | PlainParts


AnyQuestion = Annotated[Predicate | DecisionChoice | DecisionScore, Field(discriminator="type")]


class LabelChat(ChatRequest):
    """A question as a chat: no body of a route."""

    params_class: ClassVar[type[SamplingParams]] = RawParams


class DecisionsRequest(Body):
    """POST /v1/decisions."""

    says_nothing = _NO_JOINT
    remedies = _JOINT
    without_effect: ClassVar[Mapping[str, str]] = {"safety_identifier": WITHOUT_EFFECT["safety_identifier"]}

    input: str | Annotated[list[DecisionMessage], Field(min_length=1, max_length=limits.MAX_MESSAGES, fail_fast=True)]
    questions: Annotated[list[AnyQuestion], Field(min_length=1, max_length=MAX_QUESTIONS, fail_fast=True)]
    model: Name | None = None
    cache_salt: _Salt | None = None
