"""Deficit round robin: how clients share the prefill tokens of a step (Shreedhar and Varghese, 1995)."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping


class FairShare:
    """Gives each client that wants tokens a quantum a turn, and remembers whose turn it is.

    A turn that the end of a step interrupts goes on in the next step. A client that wants nothing leaves and keeps no
    credit. Tokens that a client could not use, because what it must compute at once is larger than its share, are kept
    for it (`defer`), so its share grows until it suffices.

    Args:
        quantum: tokens of one turn.
        most: tokens of one step; no credit grows beyond it.
    """

    def __init__(self, quantum: int, most: int) -> None:
        assert 0 < quantum <= most
        self._quantum = quantum
        self._most = most
        # Client -> what is left of its turn; in the order of turns.
        self._credit: OrderedDict[str, int] = OrderedDict()

    def share(
        self, budget: int, wanted: Mapping[str, int], levels: Mapping[str, int], quantum: int | None = None
    ) -> dict[str, int]:
        """Distribute at most `budget` tokens.

        Args:
            budget: tokens of this step.
            quantum: tokens of a turn that begins in this step, if less than usual: a turn longer than the step would
                leave nothing to others.
            wanted: for each client the tokens that it could use, at least one.
            levels: for each client its priority; those with smaller numbers get all they want first.

        Returns:
            Each client's share, in the order of turns; a client without a share is absent.
        """
        credit, given = self._credit, dict[str, int]()
        quantum = self._quantum if quantum is None else max(1, min(self._quantum, quantum))
        for client in [client for client in credit if client not in wanted]:
            del credit[client]
        for client in wanted:
            credit.setdefault(client, 0)
        for level in sorted(set(levels.values())):
            turns = deque(client for client in credit if levels[client] == level)
            while turns and budget > 0:
                client = turns[0]
                had = given.get(client, 0)
                need = wanted[client] - had
                own = credit[client] or quantum
                taken = min(own, need, budget)
                given[client] = had + taken
                budget -= taken
                credit[client] = own - taken if taken < need else 0
                if not credit[client]:
                    credit.move_to_end(client)
                    turns.popleft()
                    if taken < need:
                        turns.append(client)
        return given

    def defer(self, client: str, given: int, unused: int) -> None:
        """The client could not use all that it got, because it must compute more at once: it keeps the rest.

        If it could use nothing, it is the first next time, with a quantum more.
        """
        served = unused < given
        own = self._credit[client] + unused + (0 if served else self._quantum)
        self._credit[client] = min(self._most, own)
        self._credit.move_to_end(client, last=served)
