"""AsyncLLM: the front door for servers: one asynchronous generator per request, over an engine that runs elsewhere."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeVar, TypeVarTuple, Unpack

from beheld.api.pools import Pools
from beheld.api.seeds import answers, mix
from beheld.api.start import start_both
from beheld.core.config import EngineArgs, EngineConfig, ModelInfo
from beheld.core.errors import EngineDeadError, ParamsError, StepError
from beheld.core.outputs import RequestOutput, TokenEvent
from beheld.core.params import SamplingParams
from beheld.core.request import FinishReason, LoRARequest, Request
from beheld.engine.messages import (
    Abort,
    AddLoRA,
    ClearCache,
    Died,
    Engine,
    Events,
    LoRAAdded,
    Ping,
    Pong,
    Reply,
    Stop,
    Submit,
    Tokenizer,
    Unread,
)
from beheld.engine.process import EngineProcess, Spawned
from beheld.engine.stats import EngineStats
from beheld.engine.thread import EngineThread
from beheld.inputs.pipeline import Chat, InputPipeline, PromptType, RequestOrder
from beheld.inputs.sampling import option_checks
from beheld.text.collect import Collector

__all__ = ["AsyncLLM", "EngineLocation", "EngineStats", "Pieces"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
Messages = Sequence[Mapping[str, Any]]


class Pieces(StrEnum):
    """What each output of a generator holds: all so far, only what is new, or everything at the end."""

    CUMULATIVE = "cumulative"
    DELTA = "delta"
    FINAL = "final"


class EngineLocation(StrEnum):
    """Where the engine runs: in a thread of this process, or in a process of its own."""

    THREAD = "thread"
    PROCESS = "process"


@dataclass(eq=False)
class _LiveRequest:
    """A request between its submission and its end."""

    collector: Collector
    request_ids: tuple[str, ...]
    pieces: Pieces
    started: float
    prepared: float
    first_token: float | None = None
    waited_s: float = 0.0
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def milliseconds(self) -> dict[str, float]:
        now = time.monotonic()
        first = self.first_token if self.first_token is not None else now
        return {
            "prepare": 1e3 * (self.prepared - self.started),
            "queue": 1e3 * self.waited_s,
            "prefill": max(0.0, 1e3 * (first - self.prepared - self.waited_s)),
            "decode": 1e3 * (now - first),
            "first_token": 1e3 * (first - self.started),
            "total": 1e3 * (now - self.started),
        }


class AsyncLLM:
    """A model, ready to answer many at once. Give no model to use the small embedded one.

    All coroutines must run in one event loop. Preparing prompts and media happens in threads, off the loop.

    Args:
        model: a folder, a hub name, or None.
        engine: "thread" or "process", or a process that was begun before. A process has the
            interpreter to itself, and its end is not ours.
        **options: every field of EngineArgs.

    Raises:
        ConfigError, ModelError, CapacityError: as LLM.
    """

    def __init__(
        self, model: str | None = None, *, engine: str | Spawned = EngineLocation.THREAD, **options: Any
    ) -> None:
        args = EngineArgs.from_keywords({"model": model, **options})
        # Before the weights are loaded: a wrong word should not cost minutes.
        option_checks.check(args)
        if isinstance(engine, Spawned) or EngineLocation(engine) is EngineLocation.PROCESS:
            processor = option_checks.load_for_options(args)
            remote = EngineProcess(args, engine if isinstance(engine, Spawned) else None)
            try:
                inputs = InputPipeline(remote.info, remote.config, args, processor=processor)
            except BaseException:
                remote.close()
                raise
            compiler = inputs.compiler
            remote.use(lambda: Tokenizer(compiler.tokenizer_json(), compiler.vocab_size, compiler.eos_ids))
            self._open(args, remote.info, remote.config, inputs, remote)
            return
        setup, inputs = start_both(args)
        self._open(args, setup.info, setup.config, inputs, EngineThread(setup.core))

    def _open(
        self, args: EngineArgs, info: ModelInfo, config: EngineConfig, inputs: InputPipeline, engine: Engine
    ) -> None:
        self.info = info
        self.config = config
        self._engine = engine
        self._inputs = inputs
        self._defaults = self._inputs.default_params()
        self._pools = Pools()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._live: dict[str, _LiveRequest] = {}
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()
        self._reason = "The engine was closed."
        engine.start(self._receive)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> AsyncLLM:
        """The same from EngineArgs."""
        return cls(**vars(engine_args))

    # ------------------------------------------------------------------ asking

    def generate(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
        client: str = "",
        pieces: str = Pieces.CUMULATIVE,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer a prompt; forms as for LLM.generate. The last output is finished.

        Closing the generator, or cancelling the task that reads it, aborts the request. Prompts of different
        `client`s take turns; all requests without one are one client's.

        Raises:
            UserError, EngineError: from the first read on, whatever concerns this request.
        """
        return self._answer(prompt, sampling_params, request_id, lora_request, priority, client, Pieces(pieces))

    def chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
        client: str = "",
        pieces: str = Pieces.CUMULATIVE,
        marks: Collection[str] = (),
        prepared: Callable[[], None] = lambda: None,
        **options: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer a conversation of OpenAI messages; otherwise as `generate`.

        Args:
            marks: special tokens that the text shows where they come first, even if it skips special tokens.
            prepared: called when the messages were read and nothing of them is kept here any more.
            options: further fields of Chat.
        """
        prompt = Chat(messages, **options)
        return self._answer(
            prompt, sampling_params, request_id, lora_request, priority, client, Pieces(pieces), marks, prepared
        )

    async def abort(self, request_id: str) -> None:
        """End a request; its generator gives a last output with the finish reason "abort"."""
        found = self._live.get(request_id) or self._live.get(f"{request_id}#0")
        if found is not None:
            self._engine.send(Abort(found.request_ids))

    async def ping(self) -> EngineStats:
        """The engine's counters, by a round trip to it between two of its steps.

        Raises:
            EngineDeadError: it has died.
        """
        stats: EngineStats = await self._ask(Ping)
        return stats

    async def add_lora(self, lora_request: LoRARequest) -> None:
        """Read an adapter now, so that the first request that names it need not wait.

        Raises:
            LoRAError: it cannot be used; the message says why and what to do.
            EngineDeadError: the engine has died.
        """
        await self._ask(lambda number: AddLoRA(number, lora_request))

    async def _ask(self, message: Callable[[int], Ping | AddLoRA]) -> Any:
        """Send the message of a new number, and wait for its answer."""
        self._check_alive()
        loop = self._attach()
        number = next(self._numbers)
        answer: asyncio.Future[Any] = loop.create_future()
        self._asked[number] = answer
        self._engine.send(message(number))
        try:
            return await answer
        finally:
            self._asked.pop(number, None)

    # ------------------------------------------------------------------ asking about the model

    async def token_ids(self, prompt: PromptType, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of a prompt without media, as `generate` would see them; or of a text alone, without what the
        tokenizer puts around a prompt."""
        if isinstance(prompt, str) and not add_special_tokens:
            return await self._in(self._pools.of(prompt, None), self._inputs.reader.text_ids, prompt)
        order = RequestOrder(prompt, SamplingParams(max_tokens=1), "tokens")
        return list((await self._prepared(order)).token_ids)

    async def chat_token_ids(self, messages: Messages, **options: Any) -> list[int]:
        """The ids of a conversation, with those that stand for its media."""
        order = RequestOrder(Chat(messages, **options), SamplingParams(max_tokens=1), "tokens")
        return list((await self._prepared(order)).token_ids)

    async def text_of(self, token_ids: Sequence[int]) -> str:
        """What these ids spell, special tokens included.

        Raises:
            ParamsError: an id is not in the vocabulary, or there is no tokenizer.
        """
        tokenizer = self._inputs.tokenizer
        if tokenizer is None:
            raise ParamsError("There is no tokenizer.", param="tokens")
        for token in token_ids:
            if not 0 <= token < self.info.num_ids:
                raise ParamsError(
                    f"The token id {token} is outside the vocabulary of {self.info.num_ids}.", param="tokens"
                )
        ids = list(token_ids)
        return str(await self._in(self._pools.text, tokenizer.decode, ids, False))

    def get_tokenizer(self) -> Any:
        """The checkpoint's tokenizer. Requests are tokenized by a copy from now on: calls of it change nothing."""
        return self._inputs.share_tokenizer()

    @property
    def tokenizer(self) -> Any:
        """The same, for reading alone: its calls would change what requests become."""
        return self._inputs.tokenizer

    @property
    def chat_template(self) -> str | None:
        """The template that conversations with tools are rendered with; None if there is none."""
        return self._inputs.chat_template

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters the model's own generation_config.json recommends."""
        return self._defaults.clone()

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes."""
        self._engine.send(ClearCache())

    @property
    def alive(self) -> bool:
        """False once the engine has died or was closed."""
        return self._engine.alive

    @property
    def reason(self) -> str:
        """Why it is not alive, once it is not."""
        return self._reason

    @property
    def num_live(self) -> int:
        """Sequences that were submitted and have not ended."""
        return len(self._live)

    def close(self) -> None:
        """Abort everything, end the engine and give back its memory."""
        self._engine.close()
        self._fail_all()
        self._pools.close()
        self._inputs.close()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    # ------------------------------------------------------------------ one request

    async def _answer(
        self,
        prompt: PromptType | Chat,
        params: SamplingParams | None,
        request_id: str | None,
        lora: LoRARequest | None,
        priority: int,
        client: str,
        pieces: Pieces,
        marks: Collection[str] = (),
        prepared: Callable[[], None] = lambda: None,
    ) -> AsyncGenerator[RequestOutput, None]:
        live = await self._submit(prompt, params, request_id, lora, priority, client, pieces, marks)
        # What was given may be large, and the answer may take long.
        del prompt
        prepared()
        try:
            while True:
                await live.changed.wait()
                live.changed.clear()
                finished = live.collector.finished
                output = live.collector.delta() if pieces is Pieces.DELTA else live.collector.output()
                if output.error is not None:
                    raise output.error
                output.milliseconds = live.milliseconds()
                yield output
                if finished:
                    return
        finally:
            self._forget(live)

    async def _submit(
        self,
        prompt: PromptType | Chat,
        params: SamplingParams | None,
        request_id: str | None,
        lora: LoRARequest | None,
        priority: int,
        client: str,
        pieces: Pieces,
        marks: Collection[str],
    ) -> _LiveRequest:
        self._check_alive()
        self._attach()
        started = time.monotonic()
        number = next(self._numbers)
        name = str(number) if request_id is None else request_id
        chosen = self.get_default_sampling_params() if params is None else params
        chosen.verify()
        if name in self._live or f"{name}#0" in self._live:
            raise ParamsError(f"A request with the id {name!r} is still running.", param="request_id")
        base = chosen.seed if chosen.seed is not None else mix(self.config.seed, number)
        first = await self._prepared(
            RequestOrder(prompt, chosen, name, lora, priority, arrival=started, client=client, seed=base)
        )
        requests = answers(first, chosen.n, base)
        collector = Collector(name, chosen, requests, self._inputs.tokenizer, marks)
        ids = tuple(request.id for request in requests)
        live = _LiveRequest(collector, ids, pieces, started, time.monotonic())
        self._check_alive()
        self._live.update(dict.fromkeys(ids, live))
        self._engine.send(Submit(tuple(requests)))
        return live

    async def _prepared(self, order: RequestOrder) -> Request:
        """A request. What waits for other machines waits in the event loop, all else is done in the pools' threads.

        If this is cancelled, so is the order: what works on it is ended, and its thread is free for others.
        """
        pool, inputs = self._pools.of(order.prompt, order.params), self._inputs
        try:
            if pool is not self._pools.media:
                return await self._in(pool, inputs.prepare, order)
            read = await self._in(pool, inputs.read, order)
            async with inputs.fetched(read) as fetched:
                made = await self._in(pool, inputs.make_items, fetched)
            if order.params.structured_outputs is not None:
                pool = self._pools.grammar
            return await self._in(pool, inputs.seal, made)
        finally:
            order.cancel.cancel()

    def _forget(self, live: _LiveRequest) -> None:
        """The generator has ended, for whatever reason: what of it still runs is of no use."""
        left = tuple(name for name in live.request_ids if self._live.pop(name, None) is not None)
        if left:
            self._engine.send(Abort(left))

    # ------------------------------------------------------------------ news from the engine

    def _receive(self, reply: Reply) -> None:
        """Called in a thread of the engine's side."""
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._take, reply)

    def _take(self, reply: Reply) -> None:
        if isinstance(reply, Events):
            for event in reply.events:
                self._push(event)
        elif isinstance(reply, Pong | LoRAAdded):
            waiting = self._asked.get(reply.number)
            if waiting is None or waiting.done():
                return
            if isinstance(reply, Pong):
                waiting.set_result(reply.stats)
            elif reply.error is not None:
                waiting.set_exception(reply.error)
            else:
                waiting.set_result(None)
        elif isinstance(reply, Unread):
            self._fail(reply.request_ids, reply.number)
        elif isinstance(reply, Died):
            self._reason = f"The engine has died ({reply.reason})."
            self._fail_all()

    def _push(self, event: TokenEvent) -> None:
        live = self._live.get(event.request_id)
        if live is None:
            return
        if live.first_token is None:
            live.first_token = time.monotonic()
            live.waited_s = event.waited_s
        if live.collector.push(event):
            self._engine.send(Stop(event.request_id))
            del self._live[event.request_id]
        elif event.finish is not None:
            del self._live[event.request_id]
        if live.pieces is not Pieces.FINAL or live.collector.finished:
            live.changed.set()

    def _fail(self, request_ids: Sequence[str], number: int | None) -> None:
        """A message from or to these requests is lost."""
        error = StepError("A message between the server and its engine could not be read.", "Try again.")
        for name in request_ids:
            self._push(TokenEvent(name, (), FinishReason.ERROR, error=error))
        waiting = None if number is None else self._asked.get(number)
        if waiting is not None and not waiting.done():
            waiting.set_exception(error)

    def _fail_all(self) -> None:
        error = EngineDeadError(self._reason, "Start it anew.")
        for name in list(self._live):
            self._push(TokenEvent(name, (), FinishReason.ERROR, error=error))
        for waiting in self._asked.values():
            if not waiting.done():
                waiting.set_exception(error)

    # ------------------------------------------------------------------ how

    def _check_alive(self) -> None:
        if not self._engine.alive:
            raise EngineDeadError(self._reason, "Start it anew.")

    def _attach(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            assert not self._live, "requests are live in another event loop"
            self._loop = loop
        return loop

    async def _in(self, pool: ThreadPoolExecutor, function: Callable[[Unpack[Ts]], T], *args: *Ts) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(pool, function, *args)
        except RuntimeError as error:
            if self._engine.alive:
                raise
            raise EngineDeadError(self._reason, "Start it anew.") from error
