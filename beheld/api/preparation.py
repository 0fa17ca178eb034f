"""Prepares requests of an event loop: threads read, decode and encode, and the loop waits for what is fetched."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, TypeVarTuple, Unpack

from beheld.api.pools import Pools, has_grammar, names_remote
from beheld.api.turn_buffer import TurnBuffer
from beheld.core.pooling_params import PoolingParams
from beheld.core.request import Request
from beheld.inputs.pipeline import InputPipeline, PromptType, RequestOrder
from beheld.inputs.request_forms import ReadRequest
from beheld.utils.cancellation import CancelToken
from beheld.utils.gil import quick_turns

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

# How many texts one job in a thread prepares: it takes a few milliseconds, and other clients' texts wait for it.
_GROUP = 64


class Preparation:
    """Prepares the requests of one event loop.

    Args:
        inputs: what is done.
        pools: the threads where it is done; closed with this.
        check_alive: raises EngineDeadError if no answer can be expected any more.
    """

    def __init__(self, inputs: InputPipeline, pools: Pools, check_alive: Callable[[], None]) -> None:
        self._inputs = inputs
        self._pools = pools
        self._check_alive = check_alive
        # Texts to be pooled come in lists: those of one turn of the loop are prepared together.
        self._texts = TurnBuffer[tuple[RequestOrder, asyncio.Future[Request]]](self._prepare_texts)
        self._jobs: set[asyncio.Task[None]] = set()

    async def prepared(self, order: RequestOrder) -> Request:
        """A prepared request. Fetching waits in the event loop; all other work runs in the pools' threads.

        Cancelling this cancels the order: its work ends, and the thread is free for others.

        Raises:
            UserError, EngineError: the order cannot be prepared.
        """
        pool, inputs = self._pools.of(order.prompt, order.params), self._inputs
        reading = self._pools.of_reading(order.prompt, order.params, pool)
        try:
            if pool is self._pools.grammar and reading is self._pools.slow:
                # Reading takes turns, because it keeps the interpreter lock; a wait for a compiler holds no turn.
                read = await self._run_in(reading, order.client, inputs.read, order)
                made = await self._run_in(pool, order.client, inputs.make_items, read)
                return await self._run_in(pool, order.client, inputs.seal, made)
            if reading is self._pools.text and isinstance(order.params, PoolingParams):
                prepared = asyncio.get_running_loop().create_future()
                self._texts.add((order, prepared))
                found: Request = await prepared
                return found
            if pool is not self._pools.media:
                return await self._run_in(reading, order.client, inputs.prepare, order)
            return await self._with_media(order, reading)
        finally:
            order.cancel.cancel()

    async def _with_media(self, order: RequestOrder, reading: ThreadPoolExecutor) -> Request:
        """A prepared request with media, which may have to be fetched."""
        pools, inputs, client = self._pools, self._inputs, order.client
        documents = inputs.documents(order)
        grammar = has_grammar(order.params)
        read: ReadRequest | None = None
        if not (documents or grammar or reading is not pools.media or names_remote(order.prompt)):
            # Most requests: one call of a thread in place of two; each costs the event loop a tenth of a millisecond.
            async with pools.media_turns.turn(client):
                found = await self._run_media(pools.media, client, inputs.read_and_completed, order)
            if isinstance(found, Request):
                return found
            read = found
        with inputs.fetch_room() as reserve:
            if documents:
                documents = await inputs.fetched_documents(documents, client, reserve)
                async with pools.media_turns.turn(client):
                    order = await self._run_media(pools.media, client, inputs.open_documents, order, documents)
            if read is None:
                read = await self._run_media(reading, client, inputs.read, order)
            async with inputs.fetched(read, reserve) as fetched, pools.media_turns.turn(client):
                if not grammar:
                    return await self._run_media(pools.media, client, inputs.completed, fetched)
                made = await self._run_media(pools.media, client, inputs.make_items, fetched)
        return await self._run_in(pools.grammar, client, inputs.seal, made)

    def _prepare_texts(self, waiting: list[tuple[RequestOrder, asyncio.Future[Request]]]) -> None:
        """Start jobs that prepare texts, each those of one client."""
        by_client: dict[str, list[tuple[RequestOrder, asyncio.Future[Request]]]] = {}
        for order, prepared in waiting:
            if not prepared.done():
                by_client.setdefault(order.client, []).append((order, prepared))
        for client, own in by_client.items():
            for first in range(0, len(own), _GROUP):
                job = asyncio.ensure_future(self._prepare_group(client, own[first : first + _GROUP]))
                self._jobs.add(job)
                job.add_done_callback(self._jobs.discard)

    async def _prepare_group(self, client: str, group: Sequence[tuple[RequestOrder, asyncio.Future[Request]]]) -> None:
        """Prepare texts in a thread. Each has its own result or error; if the job itself fails, all have its error."""
        made: Sequence[Request | BaseException]
        try:
            made = await self._run_in(
                self._pools.text, client, self._inputs.prepare_group, [order for order, _ in group]
            )
        except BaseException as error:
            made = [error] * len(group)
        for (_, prepared), one in zip(group, made, strict=True):
            if prepared.done():
                # Nobody waits for it any more.
                continue
            if isinstance(one, BaseException):
                prepared.set_exception(one)
            else:
                prepared.set_result(one)

    async def run(self, client: str, function: Callable[[Unpack[Ts]], T], *args: *Ts, of: PromptType = "") -> T:
        """Call a function in a thread, when it is the client's turn among those with prompts like `of`.

        Raises:
            EngineDeadError: this was closed.
        """
        return await self._run_in(self._pools.of(of, None), client, function, *args)

    async def waveform(self, audio: Any, client: str) -> Any:
        """The samples of an audio at the rate that the model hears.

        Raises:
            UserError: it cannot be read.
        """
        cancel = CancelToken()
        try:
            async with self._inputs.fetched_audio(audio, client) as opened, self._pools.media_turns.turn(client):
                return await self._run_in(self._pools.media, client, self._inputs.waveform, opened, cancel, client)
        finally:
            cancel.cancel()

    def close(self) -> None:
        """Prepare nothing more; does not wait for running work."""
        self._pools.close()

    async def _run_media(
        self, pool: ThreadPoolExecutor, client: str, function: Callable[[Unpack[Ts]], T], *args: *Ts
    ) -> T:
        # The event loop, the engine's links and the preparing threads all take the interpreter often.
        with quick_turns():
            return await self._run_in(pool, client, function, *args)

    async def _run_in(
        self, pool: ThreadPoolExecutor, client: str, function: Callable[[Unpack[Ts]], T], *args: *Ts
    ) -> T:
        try:
            return await self._pools.run(pool, client, function, *args)
        except RuntimeError:
            # Threads that have ended take no more work.
            self._check_alive()
            raise
