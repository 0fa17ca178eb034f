"""What clients keep the server waiting with, in the order in which it began."""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class Slowest(Generic[T]):
    """Finds what a client has kept the server waiting with for longest, which makes room for its others.

    Clients that have no names of their own are one client. Were its newest refused where there is no room, a few that
    do nothing would keep out all others.
    """

    def __init__(self) -> None:
        self._of: dict[str, dict[T, None]] = {}

    def begin(self, client: str, one: T) -> None:
        """One more of a client's; one that has begun keeps its place."""
        self._of.setdefault(client, {}).setdefault(one)

    def end(self, client: str, one: T) -> None:
        """The client keeps the server waiting no more with this one; a second call does nothing."""
        begun = self._of.get(client, {})
        begun.pop(one, None)
        if not begun:
            self._of.pop(client, None)

    def of(self, client: str) -> T | None:
        """The one of a client that began first."""
        return next(iter(self._of.get(client, ())), None)
