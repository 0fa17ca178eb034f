"""The adapters that requests may name: those of the command line, and those that the operator adds meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from beheld.api.async_llm import AsyncLLM
from beheld.core.errors import EngineError
from beheld.core.request import LoRARequest
from beheld.server import limits
from beheld.server.errors import HttpError


class Adapters:
    """Adapters by their names in requests.

    Args:
        given: those of the command line.
        taken: the names of the model itself.
    """

    def __init__(self, llm: AsyncLLM, given: Collection[LoRARequest], taken: Collection[str]) -> None:
        self._llm = llm
        self._taken = frozenset(taken)
        self._by_name = {lora.lora_name: lora for lora in given}
        # Where clients said that adapters are. The paths of the command line are the operator's.
        self._said: dict[str, str] = {}
        # Changes come one after another: two of one name would leave an adapter in memory that none can remove.
        self._changing = asyncio.Lock()
        self._last_id = max((lora.lora_int_id for lora in given), default=0)

    @property
    def names(self) -> tuple[str, ...]:
        """The names, in the order in which they came."""
        return tuple(self._by_name)

    def find(self, name: str) -> LoRARequest | None:
        """The adapter of that name."""
        return self._by_name.get(name)

    def root(self, name: str) -> str:
        """Where an adapter is, as a client said; the name of one of the command line."""
        return self._said.get(name, name)

    async def add(self, name: str, path: str, *, in_place: bool) -> None:
        """Read an adapter and let requests name it.

        Args:
            in_place: it may take the name of another, whose requests end with the adapter that they began with.

        Raises:
            HttpError: the name is taken, or there are too many.
            LoRAError: the adapter cannot be used.
        """
        if name in self._taken:
            raise HttpError(400, f"The model itself has the name {name!r}.", "Choose another.", param="lora_name")
        async with self._changing:
            former = self._by_name.get(name)
            if former is not None and not in_place:
                raise HttpError(
                    400,
                    f"The lora adapter {name!r} has already been loaded.",
                    "Set load_inplace to true to replace it, or unload it first.",
                    param="lora_name",
                )
            if former is None and len(self._by_name) >= limits.MAX_ADAPTERS:
                raise HttpError(
                    400, f"There are {len(self._by_name)} lora adapters.", "Unload one first.", param="lora_name"
                )
            # Never used again: cached prefixes and running requests go by it.
            self._last_id += 1
            lora = LoRARequest(name, self._last_id, path)
            await self._llm.add_lora(lora)
            self._by_name[name] = lora
            self._said[name] = path
            if former is not None:
                await self._llm.remove_lora(former.lora_int_id)

    async def remove(self, name: str) -> None:
        """Let requests name it no more, and free its memory; running ones finish.

        Raises:
            HttpError: there is none of that name.
            AsleepError: the engine sleeps; requests can name the adapter still.
        """
        async with self._changing:
            lora = self._by_name.pop(name, None)
            if lora is None:
                raise HttpError(
                    404,
                    f"The lora adapter {name[:128]!r} cannot be found.",
                    "GET /v1/models lists them.",
                    param="lora_name",
                )
            try:
                await self._llm.remove_lora(lora.lora_int_id)
            except EngineError:
                # A sleeping engine has it still.
                self._by_name[name] = lora
                raise
            self._said.pop(name, None)
