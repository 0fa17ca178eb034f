"""Splits answers whose parts have headers, which say whom a part is for, into reasoning and answer."""

from __future__ import annotations

import re

from beheld.text.marks import BLOCK, Beginning, Seeker

_CHANNEL, _MESSAGE, _START = "<|channel|>", "<|message|>", "<|start|>"
_ENDS = ("<|end|>", "<|return|>", "<|call|>", _START, _CHANNEL)


class _MessageSplit:
    """Splits messages with headers; subclasses read them."""

    def __init__(self, *begins: str) -> None:
        self._state = "start"
        self._beginning = Beginning(*begins)
        self._seeker = Seeker()
        self._header: list[str] = []

    @property
    def undecided(self) -> bool:
        """As reasoning.Splitter."""
        return self._state == "start"

    def push(self, text: str) -> tuple[str, str]:
        """As reasoning.Splitter."""
        reasoning: list[str] = []
        answer: list[str] = []
        for start in range(0, len(text), BLOCK):
            block = text[start : start + BLOCK]
            while block:
                block = self._read(block, reasoning, answer)
        return "".join(reasoning), "".join(answer)

    def _read(self, text: str, reasoning: list[str], answer: list[str]) -> str:
        """Consume text up to the next mark; returns the unprocessed rest."""
        raise NotImplementedError


class ChannelSplit(_MessageSplit):
    """Splits messages with headers, <|channel|>analysis<|message|>..., as gpt-oss writes them; see reasoning.Splitter.

    The channel "analysis" is reasoning. A message to a function keeps its header and ends with <|call|>, for the reader
    of calls. All others are the answer. A text that does not begin with a header is the answer.
    """

    def __init__(self) -> None:
        super().__init__(_CHANNEL, _START)

    def finish(self) -> tuple[str, str]:
        """As reasoning.Splitter."""
        if self._state == "start":
            return "", self._beginning.rest()
        rest = self._seeker.rest()
        if self._state == "header":
            return "", ""
        return (rest, "") if self._state == "reasoning" else ("", rest)

    def _read(self, text: str, reasoning: list[str], answer: list[str]) -> str:
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


_TO, _END = "to=", ("<|eom|>", "<|eot|>")
# What begins a message to a function, and what ends it, for the reader of calls.
CALLED = f"{_START}assistant {_TO}", _END[0]
# What may turn out to be a header in the middle of a message that the model did not end, and such a header.
_HOPEFUL = re.compile(r"\s+(?:t|to|to=[\w.-]{0,64})?$")
_ADDRESS = re.compile(r"(?:^|\s)to=([\w.-]{1,64})\s*$")
_LONGEST = 72


class AddressedSplit(_MessageSplit):
    """Splits messages with addresses, assistant to=self<|message|>..., as Muse writes them; see reasoning.Splitter.

    The prompt ends within the first header. What goes to "self" is reasoning, and so is what goes to "developer", which
    is not for the user; what goes to "user" or "commentary" is the answer. A message to a function keeps its header and
    ends with <|eom|>, for the reader of calls. A text that does not begin with a header is the answer.

    Args:
        unaddressed: what a message without an address is, "reasoning" or "answer".
    """

    def __init__(self, unaddressed: str) -> None:
        super().__init__(_TO, _START, _MESSAGE)
        self._kinds = {"self": "reasoning", "developer": "reasoning", "user": "answer", "commentary": "answer"}
        self._unaddressed = unaddressed
        # Whether a header was complete.
        self._addressed = False
        # The end of a message that may be the next one's header.
        self._tail = ""

    def finish(self) -> tuple[str, str]:
        """As reasoning.Splitter."""
        if self._state == "start":
            return "", self._beginning.rest()
        if self._state == "header":
            return "", "" if self._addressed else "".join(self._header) + self._seeker.rest()
        rest = self._tail + self._seeker.rest()
        return (rest, "") if self._state == "reasoning" else ("", rest)

    def _read(self, text: str, reasoning: list[str], answer: list[str]) -> str:
        if self._state == "start":
            found = self._beginning.push(text)
            if found is None:
                return ""
            blanks, mark, rest = found
            self._state = "header" if mark else "plain"
            answer.append("" if mark else blanks)
            return mark + rest
        if self._state == "plain":
            answer.append(text)
            return ""
        if self._state == "header":
            before, found_mark, rest = self._seeker.seek(text, (_MESSAGE,))
            self._header.append(before)
            if not self._addressed and sum(map(len, self._header)) > _LONGEST:
                self._state = "plain"
                answer.append("".join([*self._header, found_mark or self._seeker.rest()]))
            elif found_mark is not None:
                self._begin("".join(self._header), answer)
            return rest
        before, found_mark, rest = self._seeker.seek(text, (*_END, _START, _MESSAGE))
        shown = self._tail + before
        hopeful = _HOPEFUL.search(shown, max(0, len(shown) - _LONGEST))
        held = len(shown) if hopeful is None else hopeful.start()
        shown, self._tail = shown[:held], shown[held:]
        into = reasoning if self._state == "reasoning" else answer
        into.append(shown)
        if found_mark is None:
            return rest
        address, self._tail = self._tail, ""
        headed = found_mark == _MESSAGE and _ADDRESS.search(address) is not None
        into.append("" if headed else address)
        self._end(answer)
        if found_mark == _MESSAGE:
            self._begin(address if headed else "", answer)
        return rest

    def _end(self, answer: list[str]) -> None:
        answer.append(CALLED[1] if self._state == "call" else "")
        self._state, self._header = "header", []

    def _begin(self, header: str, answer: list[str]) -> None:
        """Begin a message after its header."""
        self._header, self._addressed = [], True
        found = _ADDRESS.search(header)
        name = None if found is None else found[1]
        self._state = self._unaddressed if name is None else self._kinds.get(name, "call")
        if self._state == "call":
            answer.append(f"{CALLED[0]}{name}{_MESSAGE}")
