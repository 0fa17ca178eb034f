"""Log-probabilities of many positions in six lists of plain values, in place of a dict of objects for each position."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableSequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, overload

from beheld.core.outputs import Logprob


@dataclass
class FlatLogprobs(MutableSequence[dict[int, Logprob] | None]):
    """A sequence of positions, read like a list of dicts: token id -> Logprob. It only grows.

    However long an answer is, the garbage collector sees seven objects. A position has the token itself first, then the
    candidates, of which the token may be one: it then stands twice, so that all positions are equally wide. Read as a
    dict it is there once. A position without an entry, as a prompt's first one, is an empty dict.

    Attributes:
        start_indices, end_indices: which entries a position has, half-open.
        token_ids, logprobs, ranks, decoded_tokens: of each entry; see Logprob.
    """

    start_indices: list[int] = field(default_factory=list)
    end_indices: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int | None] = field(default_factory=list)
    decoded_tokens: list[str | None] = field(default_factory=list)

    def append(self, value: dict[int, Logprob] | None) -> None:
        """Add a position; None is one without entries."""
        entries = {} if value is None else value
        self.append_fast(
            entries,
            [each.logprob for each in entries.values()],
            [each.rank for each in entries.values()],
            [each.decoded_token for each in entries.values()],
        )

    def append_fast(
        self,
        token_ids: Iterable[int],
        logprobs: Iterable[float],
        ranks: Iterable[int | None],
        decoded_tokens: Iterable[str | None],
    ) -> None:
        """Add a position by the columns of its entries; the shortest says how many there are."""
        self.start_indices.append(len(self.token_ids))
        for token_id, logprob, rank, text in zip(token_ids, logprobs, ranks, decoded_tokens, strict=False):
            self.token_ids.append(token_id)
            self.logprobs.append(logprob)
            self.ranks.append(rank)
            self.decoded_tokens.append(text)
        self.end_indices.append(len(self.token_ids))

    def extend(self, values: Iterable[dict[int, Logprob] | None]) -> None:
        """Add positions."""
        for each in values:
            self.append(each)

    def __len__(self) -> int:
        """How many positions there are."""
        return len(self.start_indices)

    @overload
    def __getitem__(self, index: int) -> dict[int, Logprob]: ...

    @overload
    def __getitem__(self, index: slice) -> FlatLogprobs: ...

    def __getitem__(self, index: int | slice) -> dict[int, Logprob] | FlatLogprobs:
        """A position as a dict, or several as a container of their own."""
        if isinstance(index, slice):
            chosen = FlatLogprobs()
            for start, stop in zip(self.start_indices[index], self.end_indices[index], strict=True):
                own = slice(start, stop)
                chosen.append_fast(self.token_ids[own], self.logprobs[own], self.ranks[own], self.decoded_tokens[own])
            return chosen
        if not isinstance(index, int):
            raise TypeError(f"A position is a number or a slice, not {type(index).__name__}.")
        found: dict[int, Logprob] = {}
        for place in range(self.start_indices[index], self.end_indices[index]):
            token_id = self.token_ids[place]
            if token_id not in found:
                found[token_id] = Logprob(self.logprobs[place], self.ranks[place], self.decoded_tokens[place])
        return found

    def __iter__(self) -> Iterator[dict[int, Logprob]]:
        """The positions as dicts, one after another."""
        return (self[place] for place in range(len(self)))

    def __setitem__(self, index: Any, value: Any) -> NoReturn:
        """Refused."""
        raise TypeError("Log-probabilities of a position do not change.")

    def __delitem__(self, index: Any) -> NoReturn:
        """Refused."""
        raise TypeError("Positions are not removed; take a slice.")

    def insert(self, index: int, value: Any) -> NoReturn:
        """Refused."""
        raise TypeError("Positions are added at the end alone.")
