"""Splits a model's text into reasoning, such as that between <think> and </think>, and answer."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from beheld.core.structured_outputs import ReasoningFormat
from beheld.text.channels import AddressedSplit, ChannelSplit
from beheld.text.marks import BLOCK, Beginning, Seeker, Trimmed


@dataclass(frozen=True)
class ReasoningMarks:
    """How a model delimits its reasoning.

    Attributes:
        open: the text that begins it, at the very beginning of an answer.
        close: the text that ends it.
        tokens: marks that may be special tokens; they stay in the text, so that it can be split there.
        label: what may stand between the first mark and the reasoning, and is no part of it.
        channels: makes the splitter of answers whose parts all have headers, in place of the marks.
        again: whether reasoning may also stand later in an answer; then a closing mark by itself is left out.
        verbatim: whether blank lines around the marks belong to the parts.
        closely: with `verbatim`, blanks before the closing mark belong to neither part, and those before an
            opening mark that the prompt holds already to the reasoning.
        lone: whether a closing mark at the beginning that nothing opened is left out.
        joined: whether reasoning and its marks stay in the answer, which then begins with the opening mark even where
            the prompt holds that already.
        whole: splits a whole answer into reasoning and answer, in place of the marks.
        spellings: further pairs of a first and a second mark.
        around: marks that may stand around the answer; they are no part of it.
        shown: what the chat template of a model that reasons so contains; the first of `tokens` if this is empty.
    """

    open: str
    close: str
    tokens: tuple[str, ...]
    label: str = ""
    channels: Callable[[], Splitter] | None = None
    again: bool = False
    verbatim: bool = False
    closely: bool = False
    lone: bool = False
    joined: bool = False
    whole: Callable[[str], tuple[str, str]] | None = None
    spellings: tuple[tuple[str, str], ...] = ()
    around: tuple[tuple[str, str], ...] = ()
    shown: tuple[str, ...] = ()

    @property
    def template(self) -> tuple[str, ...]:
        """What the chat template of a model that reasons so contains."""
        return self.shown or self.tokens[:1]

    def begins_inside(self, prompt: str | None) -> bool:
        """True if the prompt ends with the opening text, which some templates add."""
        return prompt is not None and prompt.rstrip().removesuffix(self.label.rstrip()).endswith(self.open)


def _tags(open: str, close: str) -> ReasoningMarks:
    return ReasoningMarks(open, close, (open, close))


def _tags_around(name: str) -> ReasoningMarks:
    """Tags of reasoning, and tags of this name around the answer."""
    around = f"<{name}>", f"</{name}>"
    tags = "<think>", "</think>"
    return ReasoningMarks(*tags, (*tags, *around), around=(around,), shown=(tags[0], around[0]))


_ADDRESSED = "to=self<|message|>", "<|eom|>"
_COHERE = "<|START_THINKING|>", "<|END_THINKING|>"
_COHERE_ANSWER = tuple((f"<|START_{name}|>", f"<|END_{name}|>") for name in ("RESPONSE", "TEXT"))
_WORDS = tuple((f"{begun} my thought process:", f"{begun} my response:") for begun in ("Here is", "Here's"))
# The variable of chat templates that asks for `nonempty`, see `splitter`.
NONEMPTY = "force_nonempty_content"
THINK = _tags("<think>", "</think>")
# Keys are the names of vLLM's --reasoning-parser, where it has the format. Of those that a template may show, the first
# counts: "think" comes before formats that leave out marks of the answer, which only their families choose.
FORMATS: dict[str, ReasoningMarks] = {
    "think": THINK,
    "ernie45": _tags_around("response"),
    "hunyuan_a13b": _tags_around("answer"),
    # The same, with every blank as vLLM's parsers of these names leave it.
    "olmo3": ReasoningMarks("<think>", "</think>", ("<think>", "</think>"), verbatim=True),
    "step3p5": ReasoningMarks("<think>", "</think>", ("<think>", "</think>"), verbatim=True, closely=True),
    "seed_oss": _tags("<seed:think>", "</seed:think>"),
    "minimax_m3": ReasoningMarks("<mm:think>", "</mm:think>", ("<mm:think>", "</mm:think>"), lone=True),
    "longcat": _tags("<longcat_think>", "</longcat_think>"),
    "apertus": _tags("<|inner_prefix|>", "<|inner_suffix|>"),
    "mistral": _tags("[THINK]", "[/THINK]"),
    "cohere": ReasoningMarks(*_COHERE, (*_COHERE, *itertools.chain(*_COHERE_ANSWER)), around=_COHERE_ANSWER),
    # MiniMax's clients send an answer back with its reasoning, as its models want it.
    "minimax_m2_append_think": ReasoningMarks("<think>", "</think>", ("<think>", "</think>"), joined=True),
    # In words, which quantized models shorten. Templates leave the reasoning out of later turns.
    "granite": ReasoningMarks(*_WORDS[0], (), verbatim=True, spellings=_WORDS[1:], shown=_WORDS[0]),
    "gemma4": ReasoningMarks("<|channel>", "<channel|>", ("<|channel>", "<channel|>"), label="thought\n", again=True),
    "openai": ReasoningMarks("<|channel|>", "<|end|>", ("<|channel|>", "<|message|>"), channels=ChannelSplit),
    # Messages with addresses; the two differ in what one without is.
    "muse": ReasoningMarks(*_ADDRESSED, _ADDRESSED, channels=partial(AddressedSplit, "reasoning"), shown=_ADDRESSED),
    "muse_glimmer": ReasoningMarks(
        *_ADDRESSED, _ADDRESSED, channels=partial(AddressedSplit, "answer"), shown=_ADDRESSED
    ),
}


def format_of(marks: ReasoningMarks) -> ReasoningFormat | None:
    """The marks for grammars and budgets; None where every part of an answer has a header."""
    return None if marks.channels is not None else ReasoningFormat(marks.open, marks.close, begun=False)


def reasoning_of(template: str | None, stated: Collection[str] = ()) -> str | None:
    """The first format whose marks the chat template shows; None if it shows none.

    Args:
        template: the text of the template.
        stated: the formats of the model's family, which are tried first.
    """
    for name in (*stated, *FORMATS):
        if all(mark in (template or "") for mark in FORMATS[name].template):
            return name
    return None


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
    made = ReasoningSplit(marks, inside=inside, calls=calls) if marks.channels is None else marks.channels()
    if marks.joined:
        made = JoinedSplit(marks.open if inside else "")
    if marks.whole is not None:
        made = WholeSplit(marks.whole)
    return NonemptySplit(made) if nonempty else made


class JoinedSplit:
    """A splitter that leaves the reasoning in the answer.

    Args:
        begun: what the prompt holds of the answer.
    """

    undecided = False

    def __init__(self, begun: str) -> None:
        self._begun = begun
        self._beginning: Beginning | None = Beginning(begun) if begun else None

    def push(self, text: str) -> tuple[str, str]:
        """As Splitter. Some models write the opening mark once more."""
        if self._beginning is None:
            return "", text
        found = self._beginning.push(text)
        if found is None:
            return "", ""
        self._beginning = None
        blanks, _, rest = found
        return "", self._begun + blanks + rest

    def finish(self) -> tuple[str, str]:
        """As Splitter."""
        rest = "" if self._beginning is None else self._begun + self._beginning.rest()
        self._beginning = None
        return "", rest


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
    call ends keeps its own. Marks around the answer, and the blank lines within them, are left out.

    Args:
        marks: how the reasoning is delimited.
        inside: the text begins inside the reasoning; some models write the opening mark once more.
        calls: marks of tool calls, which end reasoning that was not closed: some models call a tool while they reason.
    """

    def __init__(self, marks: ReasoningMarks = THINK, *, inside: bool, calls: Collection[str] = ()) -> None:
        self._marks = marks
        self._inside = inside
        self._state = "start"
        self._closes = (marks.close, *(end for _, end in marks.spellings))
        self._around = dict(marks.around)
        # What ends the answer's marks; None outside of them.
        self._end: str | None = None
        self._seeker = Seeker()
        self._trimmed = Trimmed()
        begins = (marks.open, *(begin for begin, _ in marks.spellings))
        closes = self._closes if marks.lone else ()
        self._beginning = Beginning(*begins, *closes, *(() if inside else self._around))
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
                if self._state == "closed":
                    block = self._begin_answer(block)
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
            rest = self._seeker.rest()
            rest = rest if self._end is None else self._trimmed.push(rest) + self._trimmed.rest()
            return "", rest if self._shown else rest.lstrip()
        if self._state == "closed":
            return "", self._beginning.rest().lstrip()
        rest = self._beginning.rest() if self._state == "start" else ""
        return (self._trimmed_reasoning(rest), "") if self._inside else ("", rest)

    def _begin(self, text: str) -> str:
        """Examine the beginning of the text; returns the unprocessed rest."""
        found = self._beginning.push(text)
        if found is None:
            return ""
        blanks, mark, rest = found
        if mark in self._around:
            return self._enter_answer(mark, rest)
        if mark in self._closes:
            self._close()
            return rest
        if mark or self._inside:
            self._state = "thinking" if self._label is None else "label"
            kept = not mark or (self._inside and self._marks.closely)
            return blanks + rest if kept else rest
        self._state, self._shown = "answer", True
        self._answered = True
        return blanks + rest

    def _begin_answer(self, text: str) -> str:
        """Leave out what stands before the answer; returns the unprocessed rest."""
        found = self._beginning.push(text)
        if found is None:
            return ""
        blanks, mark, rest = found
        if mark:
            return self._enter_answer(mark, rest)
        self._state = "answer"
        return blanks + rest

    def _enter_answer(self, mark: str, rest: str) -> str:
        self._state, self._end = "answer", self._around[mark]
        self._shown, self._trimmed = False, Trimmed()
        return rest

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
        before, mark, after = self._seeker.seek(text, (*self._closes, *self._calls))
        reasoning = self._trimmed_reasoning(before)
        if mark is None:
            return reasoning, ""
        blanks = self._trimmed.rest()
        self._close(answers=mark in self._calls)
        return (reasoning + blanks, mark + after) if mark in self._calls else (reasoning, after)

    def _close(self, *, answers: bool = False) -> None:
        """End the reasoning; `answers` if the answer has begun."""
        self._state, self._shown = "answer", self._answered
        if self._around and not answers:
            self._state, self._beginning = "closed", Beginning(*self._around)

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
        mark, rest = None, ""
        if self._end is not None:
            text, mark, rest = self._seeker.seek(text, (self._end,))
            text = self._trimmed.push(text)
        elif self._marks.again:
            text, mark, rest = self._seeker.seek(text, (self._marks.open, self._marks.close))
            if mark == self._marks.open:
                self._label = Beginning(self._marks.label) if self._marks.label else None
                self._state = "thinking" if self._label is None else "label"
        if not self._shown:
            text = text.lstrip()
        self._answered = self._answered or bool(text)
        self._shown = self._state == "answer" and (self._shown or bool(text))
        if self._end is not None and mark is not None:
            # Blank lines behind the answer's mark belong to nothing.
            self._end, self._shown = None, False
            self._trimmed.rest()
        return text, rest
