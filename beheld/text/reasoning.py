"""Splits a model's text into reasoning, such as that between <think> and </think>, and answer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from beheld.core.params import ReasoningFormat
from beheld.text.marks import BLOCK, Beginning, Seeker, Trimmed


@dataclass(frozen=True)
class ReasoningMarks:
    """How a model delimits its reasoning.

    Attributes:
        open: the text that begins it, at the very beginning of an answer.
        close: the text that ends it.
        tokens: marks that may be special tokens; they stay in the text, so that it can be split there.
        label: what may stand between the first mark and the reasoning, and is no part of it.
        channels: whether every part of an answer has a header, as gpt-oss writes them.
        again: whether reasoning may also stand later in an answer; then a closing mark by itself is left out.
        verbatim: whether blank lines around the marks belong to the parts.
        closely: with `verbatim`, blanks before the closing mark belong to neither part, and those before an
            opening mark that the prompt holds already to the reasoning.
        whole: splits a whole answer into reasoning and answer, in place of the marks.
    """

    open: str
    close: str
    tokens: tuple[str, ...]
    label: str = ""
    channels: bool = False
    again: bool = False
    verbatim: bool = False
    closely: bool = False
    whole: Callable[[str], tuple[str, str]] | None = None

    @property
    def template(self) -> str:
        """What the chat template of a model that reasons so contains."""
        return self.tokens[0]

    def begins_inside(self, prompt: str | None) -> bool:
        """True if the prompt ends with the opening text, which some templates add."""
        return prompt is not None and prompt.rstrip().removesuffix(self.label.rstrip()).endswith(self.open)


def _tags(open: str, close: str) -> ReasoningMarks:
    return ReasoningMarks(open, close, (open, close))


# The variable of chat templates that asks for `nonempty`, see `splitter`.
NONEMPTY = "force_nonempty_content"
THINK = _tags("<think>", "</think>")
FORMATS: dict[str, ReasoningMarks] = {
    "think": THINK,
    # The same, with every blank as vLLM's parsers of these names leave it.
    "olmo3": ReasoningMarks("<think>", "</think>", ("<think>", "</think>"), verbatim=True),
    "step3p5": ReasoningMarks("<think>", "</think>", ("<think>", "</think>"), verbatim=True, closely=True),
    "mistral": _tags("[THINK]", "[/THINK]"),
    "cohere": _tags("<|START_THINKING|>", "<|END_THINKING|>"),
    "gemma4": ReasoningMarks("<|channel>", "<channel|>", ("<|channel>", "<channel|>"), label="thought\n", again=True),
    "openai": ReasoningMarks("<|channel|>", "<|end|>", ("<|channel|>", "<|message|>"), channels=True),
}


def format_of(marks: ReasoningMarks) -> ReasoningFormat | None:
    """The marks for grammars and budgets; None where every part of an answer has a header."""
    return None if marks.channels else ReasoningFormat(marks.open, marks.close, begun=False)


def reasoning_of(template: str | None, stated: Collection[str]) -> str | None:
    """The first of a family's formats that occurs in the chat template; None if none does."""
    return next((name for name in stated if FORMATS[name].template in (template or "")), None)


class Splitter(Protocol):
    """Splits a text that arrives in pieces, for any division into pieces."""

    @property
    def undecided(self) -> bool:
        """True while the text may still turn out to begin with the opening mark."""

    def push(self, text: str) -> tuple[str, str]:
        """Add text; returns the pieces that are now certain: (reasoning, answer)."""

    def finish(self) -> tuple[str, str]:
        """The rest. Unclosed reasoning stays reasoning."""


def splitter(marks: ReasoningMarks, *, inside: bool, calls: Collection[str] = (), nonempty: bool = False) -> Splitter:
    """A splitter of one answer; see ReasoningSplit, and with `nonempty` NonemptySplit."""
    made: Splitter = ChannelSplit() if marks.channels else ReasoningSplit(marks, inside=inside, calls=calls)
    if marks.whole is not None:
        made = WholeSplit(marks.whole)
    return NonemptySplit(made) if nonempty else made


class WholeSplit:
    """A splitter that reads an answer when it is whole."""

    undecided = False

    def __init__(self, split: Callable[[str], tuple[str, str]]) -> None:
        self._split = split
        self._texts: list[str] = []

    def push(self, text: str) -> tuple[str, str]:
        """As Splitter; nothing is certain before the end."""
        self._texts.append(text)
        return "", ""

    def finish(self) -> tuple[str, str]:
        """As Splitter."""
        return self._split("".join(self._texts))


class NonemptySplit:
    """A splitter whose reasoning is the answer if only blanks follow it, so it waits for the answer to begin."""

    def __init__(self, inner: Splitter) -> None:
        self._inner = inner
        # Reasoning that waits, and blanks of the answer; None once the answer has begun.
        self._held: list[tuple[str, str]] | None = []

    @property
    def undecided(self) -> bool:
        """As Splitter."""
        return self._inner.undecided

    def push(self, text: str) -> tuple[str, str]:
        """As Splitter."""
        return self._release(*self._inner.push(text))

    def finish(self) -> tuple[str, str]:
        """As Splitter."""
        reasoning, answer = self._release(*self._inner.finish())
        if self._held is not None:
            held, blanks = _joined(self._held)
            answer, self._held = held or blanks, None
        return reasoning, answer

    def _release(self, reasoning: str, answer: str) -> tuple[str, str]:
        if self._held is not None:
            self._held.append((reasoning, answer))
            if not answer or answer.isspace():
                return "", ""
            (reasoning, answer), self._held = _joined(self._held), None
        return reasoning, answer


def _joined(parts: Sequence[tuple[str, str]]) -> tuple[str, str]:
    return "".join(reasoning for reasoning, _ in parts), "".join(answer for _, answer in parts)


class ReasoningSplit:
    """Splits an answer that may begin with reasoning; see Splitter.

    Only reasoning at the very beginning counts, unless the marks say `again`; a later mark is ordinary text. Blank
    lines around the marks at the beginning belong to neither part, unless the marks say `verbatim`; reasoning that a
    call ends keeps its own.

    Args:
        marks: how the reasoning is delimited.
        inside: the text begins inside the reasoning; some models write the opening mark once more.
        calls: marks of tool calls, which end reasoning that was not closed: some models call a tool while they reason.
    """

    def __init__(self, marks: ReasoningMarks = THINK, *, inside: bool, calls: Collection[str] = ()) -> None:
        self._marks = marks
        self._inside = inside
        self._state = "start"
        self._seeker = Seeker()
        self._trimmed = Trimmed()
        self._beginning = Beginning(marks.open)
        self._label = Beginning(marks.label) if marks.label else None
        # Whether the present part, and the answer as a whole, has shown anything.
        self._shown = self._answered = marks.verbatim
        self._calls = frozenset(calls)

    @property
    def undecided(self) -> bool:
        """As Splitter."""
        return self._state == "start" and not self._inside

    def push(self, text: str) -> tuple[str, str]:
        """As Splitter."""
        reasoning: list[str] = []
        answer: list[str] = []
        for start in range(0, len(text), BLOCK):
            block = text[start : start + BLOCK]
            while block:
                if self._state == "start":
                    block = self._begin(block)
                if self._state == "label":
                    block = self._after_label(block)
                if self._state == "thinking":
                    piece, block = self._think(block)
                    reasoning.append(piece)
                if self._state == "answer":
                    said, block = self._answer(block)
                    answer.append(said)
        return "".join(reasoning), "".join(answer)

    def finish(self) -> tuple[str, str]:
        """As Splitter."""
        if self._state == "thinking":
            return self._trimmed_reasoning(self._seeker.rest()), ""
        if self._state == "label" and self._label is not None:
            return self._trimmed_reasoning(self._label.rest()), ""
        if self._state == "answer":
            return "", self._seeker.rest()
        rest = self._beginning.rest() if self._state == "start" else ""
        return (self._trimmed_reasoning(rest), "") if self._inside else ("", rest)

    def _begin(self, text: str) -> str:
        """Examine the beginning of the text; returns the unprocessed rest."""
        found = self._beginning.push(text)
        if found is None:
            return ""
        blanks, mark, rest = found
        if mark or self._inside:
            self._state = "thinking" if self._label is None else "label"
            kept = not mark or (self._inside and self._marks.closely)
            return blanks + rest if kept else rest
        self._state, self._shown = "answer", True
        self._answered = True
        return blanks + rest

    def _after_label(self, text: str) -> str:
        """Leave the label out; returns the unprocessed rest."""
        found = None if self._label is None else self._label.push(text)
        if found is None:
            return ""
        blanks, mark, rest = found
        self._state = "thinking"
        return rest if mark else blanks + rest

    def _think(self, text: str) -> tuple[str, str]:
        """Returns (certain reasoning, unprocessed rest)."""
        before, mark, after = self._seeker.seek(text, (self._marks.close, *self._calls))
        reasoning = self._trimmed_reasoning(before)
        if mark is None:
            return reasoning, ""
        blanks = self._trimmed.rest()
        self._state, self._shown = "answer", self._answered
        return (reasoning + blanks, mark + after) if mark in self._calls else (reasoning, after)

    def _trimmed_reasoning(self, text: str) -> str:
        """Reasoning without surrounding whitespace; trailing whitespace may turn out to precede the closing tag."""
        if self._marks.verbatim and not self._marks.closely:
            return text
        if not self._shown:
            text = text.lstrip()
        self._shown = self._shown or bool(text)
        return self._trimmed.push(text)

    def _answer(self, text: str) -> tuple[str, str]:
        """Returns (certain answer, unprocessed rest)."""
        rest = ""
        if self._marks.again:
            text, mark, rest = self._seeker.seek(text, (self._marks.open, self._marks.close))
            if mark == self._marks.open:
                self._label = Beginning(self._marks.label) if self._marks.label else None
                self._state = "thinking" if self._label is None else "label"
        if not self._shown:
            text = text.lstrip()
        self._answered = self._answered or bool(text)
        self._shown = self._state == "answer" and (self._shown or bool(text))
        return text, rest


_CHANNEL, _MESSAGE, _START = "<|channel|>", "<|message|>", "<|start|>"
_ENDS = ("<|end|>", "<|return|>", "<|call|>", _START, _CHANNEL)


class ChannelSplit:
    """Splits messages with headers, <|channel|>analysis<|message|>..., as gpt-oss writes them; see Splitter.

    The channel "analysis" is reasoning. A message to a function keeps its header and ends with <|call|>, for the reader
    of calls. All others are the answer. A text that does not begin with a header is the answer.
    """

    def __init__(self) -> None:
        self._state = "start"
        self._beginning = Beginning(_CHANNEL, _START)
        self._seeker = Seeker()
        self._header: list[str] = []

    @property
    def undecided(self) -> bool:
        """As Splitter."""
        return self._state == "start"

    def push(self, text: str) -> tuple[str, str]:
        """As Splitter."""
        reasoning: list[str] = []
        answer: list[str] = []
        for start in range(0, len(text), BLOCK):
            block = text[start : start + BLOCK]
            while block:
                block = self._read(block, reasoning, answer)
        return "".join(reasoning), "".join(answer)

    def finish(self) -> tuple[str, str]:
        """As Splitter."""
        if self._state == "start":
            return "", self._beginning.rest()
        rest = self._seeker.rest()
        if self._state == "header":
            return "", ""
        return (rest, "") if self._state == "reasoning" else ("", rest)

    def _read(self, text: str, reasoning: list[str], answer: list[str]) -> str:
        """Consume text up to the next mark; returns the unprocessed rest."""
        if self._state == "start":
            found = self._beginning.push(text)
            if found is None:
                return ""
            blanks, mark, rest = found
            self._state = "header" if mark else "plain"
            answer.append("" if mark else blanks)
        elif self._state == "plain":
            answer.append(text)
            rest = ""
        elif self._state == "header":
            before, mark_found, rest = self._seeker.seek(text, (_MESSAGE,))
            self._header.append(before)
            if mark_found is not None:
                self._begin(answer)
        else:
            before, mark_found, rest = self._seeker.seek(text, _ENDS)
            (reasoning if self._state == "reasoning" else answer).append(before)
            if mark_found is not None:
                answer.append("<|call|>" if self._state == "call" else "")
                self._state = "header"
        return rest

    def _begin(self, answer: list[str]) -> None:
        """Begin a message after its header."""
        header = "".join(self._header).replace(_START, " ").replace(_CHANNEL, " ")
        self._header = []
        if " to=" in header:
            answer.append(_CHANNEL + header + _MESSAGE)
            self._state = "call"
        else:
            self._state = (
                "reasoning" if header.strip().removeprefix("assistant").lstrip().startswith("analysis") else "answer"
            )
