"""Log-probabilities of an answer's tokens and of its prompt: columns while they wait, entries when they are read."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any

from beheld.core.flat_logprobs import FlatLogprobs
from beheld.core.outputs import Logprob
from beheld.core.plan import PromptLogprobs, TokenLogprobs
from beheld.text.detokenize import BROKEN, known_texts, token_bytes, token_text, whole_characters


class AnswerColumns:
    """Log-probabilities of an answer's tokens, as columns that grow.

    A token with 20 candidates takes 260 bytes here, and some 3,000 as objects.
    """

    def __init__(self) -> None:
        self._ids, self._ranks, self._top_ids = array("i"), array("i"), array("i")
        # Their numbers stay as they are, whatever float they came from.
        self._logprobs, self._top_logprobs = array("d"), array("d")
        # Where the candidates of each token end.
        self._ends = array("q")

    def append(self, entry: TokenLogprobs) -> None:
        """Add the next token's."""
        self._ids.append(entry.token_id)
        self._ranks.append(entry.rank)
        self._logprobs.append(entry.logprob)
        self._top_ids.extend(entry.top_ids)
        self._top_logprobs.extend(entry.top_logprobs)
        self._ends.append(len(self._top_ids))

    def __len__(self) -> int:
        return len(self._ids)

    def rows(self, start: int, stop: int) -> Iterator[TokenLogprobs]:
        """Those of the tokens from `start` to before `stop`."""
        begin = self._ends[start - 1] if start else 0
        for place in range(start, stop):
            end = self._ends[place]
            yield TokenLogprobs(
                self._ids[place],
                self._logprobs[place],
                self._ranks[place],
                tuple(self._top_ids[begin:end]),
                tuple(self._top_logprobs[begin:end]),
            )
            begin = end


class AnswerEntries:
    """Entries of an answer's first tokens in the user's form, made whenever they are read.

    Args:
        columns: those of the answer, which may grow meanwhile.
        num_top: the most candidates of a token besides itself.
        tokenizer: from transformers; None leaves texts out.
        ranked: False if the candidates are not the best, but others.
    """

    def __init__(self, columns: AnswerColumns, num_top: int, tokenizer: Any | None, *, ranked: bool = True) -> None:
        self._columns = columns
        self._num_top = num_top
        self._tokenizer = tokenizer
        self._ranked = ranked
        self._count = len(columns)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[dict[int, Logprob]]:
        candidates = Candidates(self._tokenizer, ranked=self._ranked)
        for entry in self._columns.rows(0, self._count):
            yield candidates.of(entry, self._num_top)


class PromptColumnEntries:
    """A prompt's log-probabilities in the user's form, made from their columns whenever they are read.

    Args:
        columns: those of all positions but the first, which has none.
        num_top: the most candidates of a position besides the token itself.
        tokenizer: from transformers; None leaves texts out.
    """

    def __init__(self, columns: PromptLogprobs, num_top: int, tokenizer: Any | None) -> None:
        self._columns = columns
        self._num_top = num_top
        self._tokenizer = tokenizer

    def __iter__(self) -> Iterator[dict[int, Logprob] | None]:
        """One position after another."""
        candidates = Candidates(self._tokenizer)
        yield None
        for entry in self._columns:
            yield candidates.of(entry, self._num_top)

    def flat(self) -> FlatLogprobs:
        """All positions in a flat container."""
        candidates, made = Candidates(self._tokenizer), FlatLogprobs()
        made.append(None)
        for entry in self._columns:
            candidates.append_to(made, entry, self._num_top)
        return made

    def best(self, num_top: int) -> PromptColumnEntries:
        """See PromptEntries."""
        return PromptColumnEntries(self._columns, min(num_top, self._num_top), self._tokenizer)


class Candidates:
    """Converts the device's log-probabilities of consecutive positions to the user's form.

    A token may hold only a part of a character. Then its text ends before the character, and the text of the token that
    completes it holds all of it.
    """

    def __init__(self, tokenizer: Any | None, *, ranked: bool = True) -> None:
        self._tokenizer = tokenizer
        self._ranked = ranked
        self._known = {} if tokenizer is None else known_texts(tokenizer)
        # The bytes of the character that the tokens so far have begun.
        self._begun = b""

    def of(self, entry: TokenLogprobs, num_top: int) -> dict[int, Logprob]:
        """The token itself first, then the first `num_top` candidates, which have ranks if they are the best."""
        found = {entry.token_id: Logprob(entry.logprob, entry.rank, self._text(entry.token_id))}
        known = self._known
        top = zip(entry.top_ids[:num_top], entry.top_logprobs[:num_top], strict=True)
        for place, (token_id, logprob) in enumerate(top, start=1):
            if token_id not in found:
                text = known.get(token_id)
                # Broken characters are rare, and decoding them takes long.
                ready = text and BROKEN not in text
                rank = place if self._ranked else None
                found[token_id] = Logprob(logprob, rank, text if ready else self._text(token_id))
        if self._tokenizer is not None:
            self._begun = self._read(entry.token_id)[1]
        return found

    def append_to(self, flat: FlatLogprobs, entry: TokenLogprobs, num_top: int) -> None:
        """Add the same to a flat container: the token itself, then all candidates, of which it may be one."""
        top_ids = entry.top_ids[:num_top]
        flat.append_fast(
            (entry.token_id, *top_ids),
            (entry.logprob, *entry.top_logprobs[:num_top]),
            (entry.rank, *(range(1, num_top + 1) if self._ranked else [None] * len(top_ids))),
            [self._text(token_id) for token_id in (entry.token_id, *top_ids)],
        )
        if self._tokenizer is not None:
            self._begun = self._read(entry.token_id)[1]

    def _text(self, token_id: int) -> str | None:
        return None if self._tokenizer is None else self._read(token_id)[0]

    def _read(self, token_id: int) -> tuple[str, bytes]:
        """A token's text at this position, and the bytes of a character that it begins."""
        text = token_text(self._tokenizer, token_id)
        if BROKEN not in text:
            return text, b""
        try:
            return whole_characters(self._begun + token_bytes(self._tokenizer, token_id))
        except UnicodeDecodeError:
            return text, b""
