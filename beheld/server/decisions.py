"""POST /v1/systemone and /v1/decisions: how likely each given answer to a question about texts and media is.

Each question is one request: what it is about, then the question with a label for each answer. The log-probabilities of
the labels, as the first token of the model's answer, are the result. All requests begin alike, so the first one is
computed before the others, which then find its beginning in the prefix cache.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import string
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from beheld.server import limits
from beheld.server.decisions_schema import (
    MAX_CHOICES,
    MAX_LEVELS,
    MAX_QUESTIONS,
    AnyQuestion,
    DecisionChoice,
    DecisionMessage,
    DecisionsRequest,
    LabelChat,
    Predicate,
    SystemOneQuestion,
    SystemOneRequest,
)
from beheld.server.errors import HttpError
from beheld.server.field_names import FieldNames
from beheld.server.options import ServerOptions
from beheld.server.parts_schema import AudioPart, ImagePart, ImageUrl, MediaUrl, TalkedTextPart, TextPart, VideoPart
from beheld.server.schema import Message
from beheld.server.stream import Chunk

_THINKING = "enable_thinking"
_LETTERS, _DIGITS = tuple(string.ascii_uppercase), tuple(string.digits)
_LETTER = "Answer with the letter of one option only."
_NUMBER = "Answer with the number of one level only."
_EITHER = "Answer with yes or no only."
# Letters of the prompt's end with which a label is tokenized.
_END = 32


@dataclass(frozen=True)
class LabelLikelihoods:
    """The result of one question.

    Attributes:
        probabilities: of each label, among the labels.
        mass: the labels' probability among all tokens.
        is_label: whether the likeliest token is a label.
    """

    probabilities: Sequence[float]
    mass: float
    is_label: bool

    @property
    def best(self) -> int:
        """The likeliest label."""
        return max(range(len(self.probabilities)), key=self.probabilities.__getitem__)

    @property
    def confidence(self) -> float:
        """The probability of the likeliest label among all tokens."""
        return self.probabilities[self.best] * self.mass

    @property
    def level(self) -> float:
        """The expected level, where labels are levels."""
        return sum(level * likely for level, likely in enumerate(self.probabilities))


@dataclass(frozen=True)
class LabelQuestion:
    """A question as it is asked.

    Attributes:
        name: the name of its answer.
        text: what stands behind what it is about.
        labels: one for each answer.
        answer: makes the answer's object.
    """

    name: str
    text: str
    labels: tuple[str, ...]
    answer: Callable[[LabelLikelihoods], dict[str, Any]]


@dataclass(frozen=True)
class AskedQuestions:
    """A request, whichever route it came to.

    Attributes:
        parts: what the questions are about, as parts of a message, which were checked; the chats share them.
        questions: the questions.
        common: further fields of each question's chat.
        names: the client's names of a chat's fields.
    """

    parts: list[Any]
    questions: list[LabelQuestion]
    common: dict[str, Any]
    names: FieldNames

    @property
    def num_text_bytes(self) -> int:
        """About the bytes of a text in which all texts stand, as a chat has one."""
        return sum(sys.getsizeof(part.text) for part in self.parts if isinstance(part, TextPart))

    @property
    def num_at_once(self) -> int:
        """How many chats may be prepared at once: of large texts one has a copy, and of media one fetches them."""
        is_small = self.num_text_bytes <= limits.INLINE_BYTES and all(isinstance(one, TextPart) for one in self.parts)
        return len(self.questions) if is_small else 1


class _SharedParts:
    """Collects the parts that questions share; texts in a row become one part.

    Args:
        field: the client's field with them.

    Attributes:
        parts: the parts.
    """

    def __init__(self, field: str) -> None:
        self._field = field
        self.parts: list[Any] = []
        self._places: list[str] = []
        self._texts: list[str] = []

    def add(self, part: Any, place: str) -> None:
        """Add a part that was checked, and its place in the request."""
        if isinstance(part, TextPart):
            self.add_text(part.text)
            return
        self._end_text()
        self.parts.append(part)
        self._places.append(place)

    def add_text(self, text: str) -> None:
        """Add a text."""
        self._texts.append(text)

    @property
    def empty(self) -> bool:
        """Whether nothing was added."""
        return not (self.parts or self._texts)

    def names(self) -> FieldNames:
        """The client's names, once all parts are there.

        Raises:
            HttpError: there are too many parts for one message, whose last one is the question.
        """
        self._end_text()
        if len(self.parts) >= limits.MAX_PARTS:
            words = f"The questions are about more than {limits.MAX_PARTS - 1} parts."
            raise HttpError(400, words, "Send fewer.", param=self._places[limits.MAX_PARTS - 1])
        return FieldNames(self._field, places=((self._field, self._places),))

    def _end_text(self) -> None:
        text = "".join(self._texts)
        self._texts.clear()
        if text:
            self.parts.append(TalkedTextPart(type="text", text=text))
            self._places.append(self._field)


def _lines(instructions: str | None, options: Sequence[tuple[str, str, str | None]], close: str) -> str:
    """A question: its instructions, a line for each label with its name and description, and how to answer."""
    lines = [f"Question: {instructions}"] if instructions else []
    for label, name, description in options:
        lines.append(": ".join(filter(None, (label, " - ".join(filter(None, (name, description)))))))
    return "\n".join((*lines, close))


# ---------------------------------------------------------------------- /v1/systemone


def asked_systemone(body: SystemOneRequest, options: ServerOptions) -> AskedQuestions:
    """The questions of /v1/systemone.

    Raises:
        HttpError: there are too many questions or answers, or criteria of another form.
    """
    _check_count(len(body.questions), options)
    questions = [_systemone(name, question) for name, question in body.questions.items()]
    shared = _SharedParts("state")
    for number, url in enumerate(body.images or ()):
        shared.add(ImagePart(type="image_url", image_url=ImageUrl(url=url)), f"images.{number}")
    for number, url in enumerate(body.audio or ()):
        shared.add(AudioPart(type="audio_url", audio_url=MediaUrl(url=url)), f"audio.{number}")
    for number, url in enumerate(body.videos or ()):
        shared.add(VideoPart(type="video_url", video_url=MediaUrl(url=url)), f"videos.{number}")
    state = body.state if isinstance(body.state, str) else json.dumps(body.state, ensure_ascii=False)
    shared.add_text("\n\n".join(filter(None, (body.instructions, state))))
    common = _common(body) | {"priority": body.priority, "template": body.chat_template_kwargs}
    names = shared.names()
    return AskedQuestions(shared.parts, questions, common, names)


def _systemone(name: str, given: SystemOneQuestion) -> LabelQuestion:
    param = f"questions.{name[:64]}"
    if not name:
        raise HttpError(400, "A question has an empty name.", "Name each.", param="questions")
    criteria = given.criteria
    if given.type == "noul":
        if criteria is not None and not (isinstance(criteria, dict) and criteria.keys() <= {"true", "false"}):
            raise _criteria(param, "must be an object with the descriptions of true and false, or null")
        said = {key: _said(value, param) for key, value in (criteria or {}).items()}
        lines = [("yes", "", said.get("true")), ("no", "", said.get("false"))]
        return LabelQuestion(name, _lines(given.instructions, lines, _EITHER), ("yes", "no"), _noul)
    if given.type == "score":
        if not isinstance(criteria, list) or len(criteria) < 2:
            raise _criteria(param, "must be an ordered list of levels, two at least")
        if len(criteria) > MAX_LEVELS:
            raise _criteria(param, f"have {len(criteria)} levels; a score has at most {MAX_LEVELS} options")
        levels = [_said(level, param) or "" for level in criteria]
        if len(set(levels)) < len(levels):
            raise _criteria(param, "have a level twice")
        labels = _DIGITS[: len(levels)]
        numbered: list[tuple[str, str, str | None]] = [*zip(labels, levels, [None] * len(levels), strict=True)]
        return LabelQuestion(
            name, _lines(given.instructions, numbered, _NUMBER), labels, lambda read: _score(read, levels)
        )
    if not isinstance(criteria, dict) or not criteria:
        raise _criteria(param, "must be an object of options and their descriptions, or null for none")
    if len(criteria) > MAX_CHOICES:
        raise _criteria(param, f"have {len(criteria)} options; a choice has at most {MAX_CHOICES} options")
    names, labels = list(criteria), _LETTERS[: len(criteria)]
    lines = [
        (label, name, _said(criteria[name], f"{param}.criteria")) for label, name in zip(labels, names, strict=True)
    ]
    return LabelQuestion(name, _lines(given.instructions, lines, _LETTER), labels, lambda read: _choice(read, names))


def _said(given: Any, param: str) -> str | None:
    if given is not None and not isinstance(given, str | int | float):
        raise _criteria(param, "must hold texts")
    return None if given is None else str(given)


def _criteria(param: str, words: str) -> HttpError:
    return HttpError(400, f"The criteria of {param} {words}.", "Send others.", param=param)


def _noul(read: LabelLikelihoods) -> dict[str, Any]:
    yes, no = read.probabilities
    return {"type": "noul", "noul": yes, "probabilities": {"yes": yes, "no": no}, "confidence": read.confidence}


def _score(read: LabelLikelihoods, levels: Sequence[str]) -> dict[str, Any]:
    return {
        "type": "score",
        "score": read.level,
        "legend": {str(number): level for number, level in enumerate(levels)},
        "probabilities": {str(number): likely for number, likely in enumerate(read.probabilities)},
        "confidence": read.confidence,
    }


def _choice(read: LabelLikelihoods, names: Sequence[str]) -> dict[str, Any]:
    return {
        "type": "choice",
        "choice": names[read.best],
        "probabilities": dict(zip(names, read.probabilities, strict=True)),
        "confidence": read.confidence,
    }


# ---------------------------------------------------------------------- /v1/decisions


def asked_decisions(body: DecisionsRequest, options: ServerOptions) -> AskedQuestions:
    """The questions of /v1/decisions.

    Raises:
        HttpError: there are too many questions.
    """
    _check_count(len(body.questions), options)
    shared = _SharedParts("input")
    messages = [DecisionMessage(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    for number, message in enumerate(messages):
        if not shared.empty:
            shared.add_text("\n\n")
        if isinstance(message.content, str):
            shared.add_text(message.content)
            continue
        for place, part in enumerate(message.content):
            shared.add(part, f"input.{number}.content.{place}")
    questions = [_decision(str(number), question) for number, question in enumerate(body.questions)]
    names = shared.names()
    return AskedQuestions(shared.parts, questions, _common(body), names)


def _decision(number: str, given: AnyQuestion) -> LabelQuestion:
    if isinstance(given, Predicate):
        sides: list[tuple[str, str, str | None]] = [("A", "false", None), ("B", "true", None)]

        def predicate(read: LabelLikelihoods) -> dict[str, Any]:
            return {"type": "predicate", "name": given.name, "probability": read.probabilities[1]}

        return LabelQuestion(number, _lines(given.instructions, sides, _LETTER), _LETTERS[:2], predicate)
    if isinstance(given, DecisionChoice):
        options = [(json.dumps(one.value, ensure_ascii=False), one.description) for one in given.choices]
        values = [one.value for one in given.choices]

        def answer(read: LabelLikelihoods) -> dict[str, Any]:
            likely = zip(values, read.probabilities, strict=True)
            return {
                "type": "choice",
                "name": given.name,
                "choice": values[read.best],
                "probabilities": [{"value": value, "probability": one} for value, one in likely],
                "confidence": read.confidence,
            }

    else:
        options = [(level.label, level.description) for level in given.levels]

        def answer(read: LabelLikelihoods) -> dict[str, Any]:
            likely = enumerate(zip(options, read.probabilities, strict=True))
            return {
                "type": "score",
                "name": given.name,
                "score": read.level,
                "probabilities": [{"value": n, "label": name, "probability": one} for n, ((name, _), one) in likely],
                "confidence": read.confidence,
            }

    labels = _LETTERS[: len(options)]
    lines = [(label, name, description) for label, (name, description) in zip(labels, options, strict=True)]
    return LabelQuestion(number, _lines(given.instructions, lines, _LETTER), labels, answer)


# ---------------------------------------------------------------------- both


def _check_count(count: int, options: ServerOptions) -> None:
    most = min(MAX_QUESTIONS, options.max_answers)
    if count > most:
        words = f"The request has {count} questions; at most {most} are allowed."
        raise HttpError(400, words, "Send several requests.", param="questions")


def _common(body: SystemOneRequest | DecisionsRequest) -> dict[str, Any]:
    return {"model": body.model, "cache_salt": body.cache_salt}


def variables_of(ask: AskedQuestions, template: str | None, usual: Mapping[str, Any]) -> dict[str, Any] | None:
    """The variables of the model's template: an answer begins at once, without reasoning.

    Args:
        template: the model's.
        usual: the operator's variables, which hold where neither the request nor this says anything.

    Raises:
        HttpError: the request wants reasoning.
    """
    given: dict[str, Any] = ask.common.get("template") or {}
    if given.get(_THINKING):
        words = "The first token of an answer is read, so thinking must be off."
        raise HttpError(400, words, f"Leave {_THINKING} out.", param=f"chat_template_kwargs.{_THINKING}")
    return {**usual, **({_THINKING: False} if _THINKING in (template or "") else {}), **given} or None


def label_ids(tokenizer: Any, prompt: str, questions: Sequence[LabelQuestion]) -> dict[str, int]:
    """The token of each label as the beginning of an answer to a prompt: the first of its tokens.

    Raises:
        HttpError: two labels of a question begin with the same token.
    """

    def ids(text: str) -> list[int]:
        found: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return found

    end = prompt[-_END:]
    before, first = ids(end), dict[str, int]()
    for label in dict.fromkeys(label for question in questions for label in question.labels):
        whole = ids(end + label)
        # No answer begins with a token that the prompt's end and the label share.
        own = whole[len(before) :] if whole[: len(before)] == before else ids(label)
        first[label] = own[0]
    for question in questions:
        if len({first[label] for label in question.labels}) < len(question.labels):
            words = "Two labels of this question begin with the same token of this model's tokenizer."
            raise HttpError(400, words, "Ask questions of another type.", param=f"questions.{question.name[:64]}")
    return first


def shared_chat(ask: AskedQuestions, variables: dict[str, Any] | None) -> LabelChat:
    """What the chats of all questions have in common: everything but the message and the labels.

    Args:
        variables: those of the template.
    """
    asked = {
        **{name: value for name, value in ask.common.items() if name != "template"},
        "messages": [{"role": "user", "content": ""}],
        "max_tokens": 1,
        "min_tokens": 0,
        # A token that ends answers is one, too.
        "ignore_eos": True,
        "temperature": 0.0,
        "repetition_penalty": 1.0,
        "logprobs": True,
        "return_tokens_as_token_ids": True,
    }
    # The request's variables were checked, and the server adds to them.
    return LabelChat.model_validate(asked).model_copy(update={"chat_template_kwargs": variables})


def chat_of(ask: AskedQuestions, shared: LabelChat, question: LabelQuestion, labels: Mapping[str, int]) -> LabelChat:
    """The chat that asks a question.

    Its parts are those of the request, and are not checked again: there may be thousands, for each of many questions.

    Args:
        shared: what the chats have in common.
        labels: the token of each label.
    """
    text = f"\n\n{question.text}" if ask.parts else question.text
    content: Any = [*ask.parts, TalkedTextPart(type="text", text=text)]
    if all(isinstance(part, TextPart) for part in content):
        content = "".join(part.text for part in content)
    message = Message.model_construct(role="user", content=content)
    ids = [labels[label] for label in question.labels]
    return shared.model_copy(update={"messages": [message], "logprob_token_ids": ids})


async def reads(
    start: Callable[[int], AsyncGenerator[Chunk, None]], questions: Sequence[LabelQuestion], labels: Mapping[str, int]
) -> AsyncGenerator[Chunk, None]:
    """The result of each question as a chunk, in their order; `start` begins the chat of one.

    Raises:
        HttpError: 503 if a question was aborted.
    """

    async def of(number: int) -> Chunk:
        made: Chunk = {}
        async with contextlib.aclosing(start(number)) as chunks:
            async for chunk in chunks:
                made |= {name: chunk[name] for name in ("usage", "media", "warnings") if name in chunk}
                for choice in chunk["choices"]:
                    if choice["logprobs"] is not None:
                        (entry,) = choice["logprobs"]["content"]
                        made["read"] = _read(entry, [labels[label] for label in questions[number].labels])
        if "read" not in made:
            # The operator put the engine to sleep, or paused it.
            raise HttpError(503, "The request was aborted.", "Send it again.", headers={"Retry-After": "1"})
        return made

    yield await of(0)
    tasks = [asyncio.create_task(of(number)) for number in range(1, len(questions))]
    try:
        for task in tasks:
            yield await task
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _read(entry: Mapping[str, Any], ids: Sequence[int]) -> LabelLikelihoods:
    by_name = {one["token"]: one["logprob"] for one in entry["top_logprobs"]}
    names = [f"token_id:{one}" for one in ids]
    logprobs = [by_name[name] for name in names]
    greatest = max(logprobs)
    weights = [math.exp(one - greatest) for one in logprobs]
    mass = min(1.0, math.exp(greatest) * sum(weights))
    return LabelLikelihoods([one / sum(weights) for one in weights], mass, entry["token"] in names)


async def folded_systemone(parts: AsyncIterator[Chunk], ask: AskedQuestions, head: Mapping[str, Any]) -> dict[str, Any]:
    """The body of a response of /v1/systemone."""
    answers, diagnostics = dict[str, Any](), dict[str, Any]()
    usage = {"input_tokens": 0, "output_tokens": 0}
    more: dict[str, Any] = {}
    async for question, chunk in _each(parts, ask):
        answers[question.name] = question.answer(chunk["read"])
        diagnostics[question.name] = {"label_mass": chunk["read"].mass, "argmax_is_label": chunk["read"].is_label}
        usage["input_tokens"] += chunk["usage"]["prompt_tokens"]
        usage["output_tokens"] += chunk["usage"]["completion_tokens"]
        more = more or {name: chunk[name] for name in ("media", "warnings") if name in chunk}
    shown = {"answers": answers, "usage": usage, "diagnostics": diagnostics, "joint": None}
    return {**head, "object": "structured_decision", **shown, **more}


async def folded_decisions(parts: AsyncIterator[Chunk], ask: AskedQuestions, head: Mapping[str, Any]) -> dict[str, Any]:
    """The body of a response of /v1/decisions."""
    answers: list[dict[str, Any]] = []
    prompt = cached = answered = 0
    more: dict[str, Any] = {}
    async for question, chunk in _each(parts, ask):
        answers.append(question.answer(chunk["read"]))
        usage = chunk["usage"]
        prompt, answered = prompt + usage["prompt_tokens"], answered + usage["completion_tokens"]
        cached += (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        more = more or {name: chunk[name] for name in ("media", "warnings") if name in chunk}
    usage = {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": answered,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + answered,
    }
    return {"model": head["model"], "answers": answers, "usage": usage, **more}


async def _each(parts: AsyncIterator[Chunk], ask: AskedQuestions) -> AsyncIterator[tuple[LabelQuestion, Chunk]]:
    number = 0
    async for chunk in parts:
        yield ask.questions[number], chunk
        number += 1
