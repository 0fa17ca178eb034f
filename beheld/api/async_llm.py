"""AsyncLLM, the entry point for servers: an asynchronous generator per request, over an engine that runs elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from functools import partial
from typing import Any

from beheld.api import long_texts, transcribe
from beheld.api.beam import answer_of, blaming_beams, step_of
from beheld.api.collectors import Params, collector_of
from beheld.api.live_request import LiveRequest, Pieces
from beheld.api.live_requests import LiveRequests
from beheld.api.pools import Pools
from beheld.api.preparation import Preparation
from beheld.api.seeds import answers, seed_of
from beheld.api.start import Remote, start_both, start_processes, warms_grammars
from beheld.api.transcribe import Fallback
from beheld.api.turn_buffer import TurnBuffer
from beheld.api.user_request import UserRequest
from beheld.core.beams import BeamSearch, BeamSearchParams, checked
from beheld.core.config import EngineArgs, EngineConfig, ModelInfo
from beheld.core.errors import AsleepError, EngineDeadError, ParamsError, StepError
from beheld.core.outputs import PoolingRequestOutput, RequestOutput
from beheld.core.params import RequestOutputKind, SamplingParams
from beheld.core.pooling_params import Alignment, Pooling, PoolingParams
from beheld.core.profiling import ProfilerConfig
from beheld.core.request import LoRARequest, Request
from beheld.core.sampling import Sampling
from beheld.core.sleep import MEMORY, EnginePart, PauseMode, level_of, mode_of, parts_of
from beheld.core.speech import SpeechForm, SpeechOrder, SpeechPiece, SpeechTokens
from beheld.engine.messages import (
    Abort,
    AddLoRA,
    Asleep,
    CheckWeights,
    ClearCache,
    Died,
    Engine,
    Events,
    LoRAAction,
    LoRAAdded,
    LoRAsManaged,
    ManageLoRA,
    Ping,
    Pong,
    Profile,
    Profiled,
    Reply,
    Sleep,
    Stop,
    Submit,
    Unread,
    WakeUp,
    WakingUp,
    WeightsChecked,
)
from beheld.engine.process import Spawned
from beheld.engine.stats import EngineReport, EngineState, EngineStats
from beheld.engine.thread import EngineThread
from beheld.inputs.pipeline import Chat, Pair, PromptType, RequestOrder
from beheld.inputs.prompt.template import text_of
from beheld.inputs.sampling import option_checks
from beheld.platform.room import check_room
from beheld.utils import env
from beheld.utils.host_turns import HostTurns

__all__ = [
    "AsyncLLM",
    "Chat",
    "EngineLocation",
    "EngineReport",
    "EngineState",
    "EngineStats",
    "Pair",
    "Pieces",
    "PromptType",
]

Messages = Sequence[Mapping[str, Any]]

# How many parts of one text the engine has at a time.
_PARTS_AT_ONCE = 4
_KINDS = {
    RequestOutputKind.CUMULATIVE: Pieces.CUMULATIVE,
    RequestOutputKind.DELTA: Pieces.DELTA,
    RequestOutputKind.FINAL_ONLY: Pieces.FINAL,
}


class EngineLocation(StrEnum):
    """Where the engine runs: in a thread of this process, or in its own process."""

    THREAD = "thread"
    PROCESS = "process"


_Asked = Ping | AddLoRA | ManageLoRA | Sleep | WakeUp | Profile | CheckWeights


def _started(args: EngineArgs, engine: str | Spawned | Sequence[Spawned]) -> Remote:
    """The engine where AsyncLLM's argument of this name says.

    Raises:
        ConfigError, ModelError, CapacityError: as LLM.
    """
    spawned = None if isinstance(engine, str) else [engine] if isinstance(engine, Spawned) else list(engine)
    if spawned or args.data_parallel_size > 1 or EngineLocation(str(engine)) is EngineLocation.PROCESS:
        return start_processes(args, spawned)
    setup, inputs = start_both(args)
    if warms_grammars(setup.info, setup.config):
        with contextlib.suppress(ParamsError):
            inputs.compiler.prepare()
    return Remote(EngineThread(setup.core), setup.info, setup.config, inputs)


def _after(params: Sampling | Pooling, num_answered: int) -> Sampling | Pooling:
    """A step's parameters after so many tokens of a search's answer."""
    if not isinstance(params, Sampling) or params.grammar is None:
        return params
    return replace(params, num_answered=num_answered)


def _read_at_end(request: Request, params: Params) -> Request:
    """The request of an answer that is read only once it is complete."""
    if not isinstance(params, SamplingParams):
        # A pooled request ends with its first event.
        return request
    # As resolved: `logprob_token_ids` alone asks for log-probabilities, too. Stop strings are searched for here, in the
    # text of each token.
    reports = isinstance(request.params, Sampling) and request.params.logprobs is not None
    return replace(request, restartable=True, at_end=not (params.stop or reports))


class AsyncLLM:
    """A model that answers many requests at once. Without a model name it uses the small embedded one.

    All coroutines must run in one event loop. Threads prepare prompts and media, outside of the loop.

    Args:
        model: a folder, a hub name, or None.
        engine: "thread", "process", processes that were spawned before, or an engine that was started elsewhere
            (api/start.py). A process has an interpreter of its own, and this process survives its crash. With
            data_parallel_size above 1, there is a process for each engine.
        **options: every field of EngineArgs.

    Raises:
        ConfigError, ModelError, CapacityError: as LLM.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        engine: str | Spawned | Sequence[Spawned] | Remote = EngineLocation.THREAD,
        **options: Any,
    ) -> None:
        args = EngineArgs.from_keywords({"model": model, **options})
        # Before loading the weights, so that a misspelt option does not cost minutes.
        check_room(args)
        option_checks.check(args)
        remote = engine if isinstance(engine, Remote) else _started(args, engine)
        self.info: ModelInfo = remote.info
        self.config: EngineConfig = remote.config
        self._engine: Engine = remote.engine
        self._inputs = remote.inputs
        self._defaults = self._inputs.default_params()
        # Read once, as those of conversations.
        self._profiles = ProfilerConfig.of(args.profiler_config).torch_profiler_dir
        self._scoring_template = text_of(args.chat_template) if args.chat_template else None
        self.host = HostTurns()
        self._preparation = Preparation(self._inputs, Pools(self.host, remote.place), self._check_alive)
        self._outbox = TurnBuffer[Request](lambda requests: self._engine.send(Submit(tuple(requests))))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._live = LiveRequests(lambda request_id: self._engine.send(Stop(request_id)))
        # The names of the parts of a long text that is pooled; without an entry, the text was aborted.
        self._in_parts: dict[str, list[str]] = {}
        self._asked: dict[int, asyncio.Future[Any]] = {}
        # Seconds from token to token of answers, as they come from the engine.
        self.token_gaps = self._live.token_gaps
        # What the engine lacks, as it last reported, and the level at which it was sent to sleep.
        self._lacks = frozenset[EnginePart]()
        self._level = 0
        # The numbers of the messages to wake up that are not answered yet.
        self._waking = set[int]()
        self._woken_s = -math.inf
        self._numbers = remote.place.numbers()
        self._reason = "The engine is closed."
        self._engine.start(self._receive)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> AsyncLLM:
        """Build from EngineArgs."""
        return cls(**engine_args.keywords())

    # ------------------------------------------------------------------ asking

    def generate(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
        pieces: str | None = None,
        client: str = "",
        prepared: Callable[[], None] = lambda: None,
        grounding: bool = False,
        lazy_prompt: bool = False,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer a prompt; forms as for LLM.generate. The last output is finished.

        `pieces` says what each output holds; None leaves it to `sampling_params.output_kind`.

        Closing the generator, or cancelling the task that reads it, aborts the request. `client` says who asks, in any
        words: one client's work leaves room for the others'. `prepared` is called when the prompt is processed and no
        reference to it is kept. With `grounding`, a finished answer has what it locates in the image, in the image's
        pixels. With `lazy_prompt`, outputs have `prompt_entries` in place of
        `prompt_logprobs`.

        Raises:
            UserError, EngineError: the request failed; raised by the first read or a later one.
        """
        kind = _KINDS[sampling_params.output_kind] if sampling_params is not None else Pieces.CUMULATIVE
        held = kind if pieces is None else Pieces(pieces)
        return self._answer(
            UserRequest(
                prompt,
                sampling_params,
                request_id,
                lora_request,
                priority,
                held,
                client,
                prepared=prepared,
                grounding=grounding,
                lazy_prompt=lazy_prompt,
            )
        )

    def chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
        pieces: str = Pieces.CUMULATIVE,
        client: str = "",
        marks: Collection[str] = (),
        prepared: Callable[[], None] = lambda: None,
        grounding: bool = False,
        lazy_prompt: bool = False,
        **options: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer a conversation of OpenAI messages; otherwise like `generate`.

        Args:
            marks: special tokens whose first occurrence is in the text even if special tokens are skipped.
            prepared: called when the messages are processed and no reference to them is kept.
            options: further fields of Chat.
        """
        return self._answer(
            UserRequest(
                Chat(messages, **options),
                sampling_params,
                request_id,
                lora_request,
                priority,
                Pieces(pieces),
                client,
                marks,
                prepared,
                grounding,
                lazy_prompt,
            )
        )

    async def beam_search(
        self,
        prompt: PromptType | Chat,
        params: BeamSearchParams,
        request_id: str | None = None,
        *,
        logprobs: int | None = None,
        skip_special_tokens: bool = True,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
        client: str = "",
        prepared: Callable[[], None] = lambda: None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """The likeliest answers to a prompt or a conversation; see core/beams.py for what the scores are.

        Args:
            logprobs: how many candidates are given for each token besides itself; None for no log-probabilities.
            prepared: as for `chat`.

        Yields:
            One output, with up to `beam_width` answers, the best first.

        Raises:
            UserError, EngineError: a request failed.
        """
        self._check_alive()
        self._attach()
        started, number = time.monotonic(), next(self._numbers)
        step = step_of(checked(params), logprobs)
        name = str(number) if request_id is None else request_id
        order = RequestOrder(prompt, step, name, lora=lora_request, priority=priority, arrival=started, client=client)
        with blaming_beams(params, logprobs):
            first = await self._preparation.prepared(order)
        # The input may be large, and the search may take long.
        del prompt, order
        prepared()
        search = BeamSearch(first.token_ids, params, sorted(self._inputs.compiler.eos_ids), self.config.max_model_len)
        output: RequestOutput | None = None
        while search.beams:
            asked = [
                self._begin(
                    replace(
                        first,
                        id=f"{name}/{place}",
                        token_ids=tuple(beam.tokens),
                        params=_after(first.params, len(beam.logprobs)),
                    ),
                    step,
                    started,
                )
                for place, beam in enumerate(search.beams)
            ]
            try:
                answered = [await live.ended() for live in asked]
            finally:
                for live in asked:
                    self._forget(live)
            output = answered[0] if output is None else replace(output, milliseconds=answered[-1].milliseconds)
            search.take([one.outputs[0].logprobs[0] for one in answered])
        assert output is not None, "a search without a step"
        tokenizer = self._inputs.tokenizer
        output.outputs = [
            answer_of(sequence, len(first.token_ids), index, logprobs, tokenizer, skip_special_tokens)
            for index, sequence in enumerate(search.best())
        ]
        yield replace(output, request_id=name, prompt_token_ids=list(first.token_ids))

    def encode(
        self,
        prompt: PromptType | Chat | Pair,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
        client: str = "",
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        """Pool a prompt, a conversation or a pair of texts; otherwise like `generate`. There is one output.

        Args:
            pooling_params: what to make of it; None takes the model's defaults.
        """
        params = PoolingParams() if pooling_params is None else pooling_params
        if long_texts.may_be_long(prompt, params, self.info.pooler, self.config.max_model_len):
            return self._encode_parts(prompt, params, request_id, lora_request, priority, client)
        return self._answer(UserRequest(prompt, params, request_id, lora_request, priority, Pieces.FINAL, client))

    async def _encode_parts(
        self,
        prompt: Any,
        params: PoolingParams,
        request_id: str | None,
        lora: LoRARequest | None,
        priority: int,
        client: str,
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        """The vector of a text that may be longer than the model reads: the mean of its parts' vectors."""
        params.verify()
        name = str(next(self._numbers)) if request_id is None else request_id
        ids = await self._preparation.run(client, self._inputs.ids_of_long, prompt, params, of=prompt)
        parts = long_texts.parts_of(prompt, ids, self.config.max_model_len)
        own = long_texts.alone(params)
        if len(parts) == 1:
            # Its ids are known, so its text is not encoded again.
            (part,) = parts
            whole = self._answer(UserRequest(part, own, name, lora, priority, Pieces.FINAL, client))
            async with contextlib.aclosing(whole) as answers:
                async for answer in answers:
                    yield replace(answer, prompt=long_texts.text_of(prompt))
            return
        self._check_name(name)
        self._in_parts[name] = names = [f"{name}-{number}" for number in range(len(parts))]
        room = asyncio.Semaphore(_PARTS_AT_ONCE)

        async def one(part_name: str, part: PromptType) -> PoolingRequestOutput:
            async with room:
                if name not in self._in_parts:
                    return long_texts.aborted(part_name)
                made = self._answer(UserRequest(part, own, part_name, lora, priority, Pieces.FINAL, client))
                async with contextlib.aclosing(made) as outputs:
                    async for output in outputs:
                        found: PoolingRequestOutput = output
                        return found
            raise AssertionError("a request ended without an output")

        tasks = [asyncio.ensure_future(one(*each)) for each in zip(names, parts, strict=True)]
        try:
            outputs = await asyncio.gather(*tasks)
        finally:
            self._in_parts.pop(name, None)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        assert self.info.pooler is not None
        made = long_texts.joined(outputs, name, prompt, params, self.info.pooler)
        made.prompt_token_ids = list(ids)
        yield made

    async def transcribe(
        self,
        audio: Any,
        order: SpeechOrder | None = None,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        fallback: Fallback | None = None,
        beams: BeamSearchParams | None = None,
        lora_request: LoRARequest | None = None,
        client: str = "",
        cache_salt: str | None = None,
        ended: Callable[[RequestOutput, int], None] = lambda output, count: None,
        decoded: Callable[[int], None] = lambda num_bytes: None,
    ) -> AsyncGenerator[SpeechPiece, None]:
        """Write down an audio of any length: bytes of a file, a URL, a path, or (samples, rate).

        Closing the generator aborts the requests.

        Args:
            order: language, task, timestamps; None for the words alone.
            sampling_params: None for greedy answers.
            fallback: when a window is sampled anew with a higher temperature; None for never.
            beams: the words of each window are searched with these, without times; `sampling_params` has no effect.
            ended: called at the end of each of its requests with the last output and the number of tokens.
            decoded: called with the bytes of the decoded samples, which are kept to the end.

        Raises:
            UserError, EngineError: the model makes no transcripts, the audio cannot be read, or a request failed.
        """
        form, tokens = transcribe.form_of(self)
        params = SamplingParams(temperature=0, max_tokens=None) if sampling_params is None else sampling_params
        name = f"speech-{next(self._numbers)}" if request_id is None else request_id
        made = transcribe.Transcription(
            self,
            form,
            tokens,
            SpeechOrder() if order is None else order,
            params,
            name,
            fallback=fallback,
            beams=beams,
            lora=lora_request,
            client=client,
            salt=cache_salt,
            ended=ended,
            decoded=decoded,
        )
        async with contextlib.aclosing(made.pieces(audio)) as pieces:
            async for piece in pieces:
                yield piece

    async def aligned(
        self,
        prompt: PromptType,
        alignment: Alignment,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
        client: str = "",
    ) -> Any:
        """How strongly the tokens of a prompt attend to its audio: weights (N, E), float32.

        N tokens from `alignment.start` on and E states; the weights of a state have mean 0 over the tokens.

        Raises:
            UserError, EngineError: the request failed.
        """
        self._check_alive()
        self._attach()
        started = time.monotonic()
        name = str(next(self._numbers)) if request_id is None else request_id
        order = RequestOrder(prompt, self._cheapest(), name, lora=lora_request, arrival=started, client=client)
        request = replace(await self._preparation.prepared(order), params=Pooling(alignment=alignment))
        live = self._begin(request, PoolingParams(), started)
        try:
            output = await live.ended()
        finally:
            self._forget(live)
        if output.outputs is None:
            raise StepError("The request was aborted.", "Send it again.")
        return output.outputs.data.numpy()

    async def waveform(self, audio: Any, *, client: str = "") -> Any:
        """The samples of an audio at the rate that the model hears, decoded as a request's are.

        Raises:
            UserError: it cannot be read.
        """
        self._check_alive()
        return await self._preparation.waveform(audio, client)

    @property
    def speech(self) -> tuple[SpeechForm, SpeechTokens | None] | None:
        """How the model is asked for transcripts; None if it makes none."""
        return self._inputs.speech

    async def abort(self, request_id: str) -> None:
        """End a request; its generator yields a last output with the finish reason "abort"."""
        parts = self._in_parts.pop(request_id, None)
        found = self._live.named(request_id)
        names = found.request_ids if found is not None else tuple(part for part in parts or () if part in self._live)
        if names:
            self._outbox.flush()
            self._engine.send(Abort(names))

    async def abort_answers(self, names: Collection[str]) -> None:
        """End the requests of these names, and those whose names are one of these, a dash and a number.

        Each that has begun yields a last output with the finish reason "abort". Names that nothing has are ignored.
        """
        if found := self._live.among(names):
            self._outbox.flush()
            self._engine.send(Abort(found))

    async def ping(self) -> EngineStats:
        """The engine's counters, by a round trip between two of its steps.

        Raises:
            EngineDeadError: the engine has died.
        """
        stats: EngineStats = await self._ask(Ping)
        return stats

    def engine_reports(self) -> tuple[EngineReport, ...]:
        """The report of each engine if there are several; empty if there is one."""
        return self._engine.reports()

    async def add_lora(self, lora_request: LoRARequest) -> None:
        """Read an adapter now, so that its first request need not wait.

        Raises:
            LoRAError: the adapter cannot be used; the message says why and what to do.
            EngineDeadError: the engine has died.
        """
        await self._ask(lambda number: AddLoRA(number, lora_request))

    async def remove_lora(self, lora_id: int) -> bool:
        """Remove an adapter by its number; requests that use it finish. False if it is not in memory."""
        return (await self._manage(LoRAAction.REMOVE, lora_id)).found

    async def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter in memory until it is removed; False if it is not in memory."""
        return (await self._manage(LoRAAction.PIN, lora_id)).found

    async def list_loras(self) -> set[int]:
        """The numbers of the adapters in memory."""
        return set((await self._manage(LoRAAction.LIST, 0)).held)

    async def _manage(self, action: LoRAAction, lora_id: int) -> LoRAsManaged:
        managed: LoRAsManaged = await self._ask(lambda number: ManageLoRA(number, action, lora_id))
        return managed

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Give memory back until `wake_up`, see LLM.sleep; of several engines, all do.

        Meanwhile requests are refused (AsleepError); at level 0, which only pauses, they wait.

        Args:
            mode: what becomes of requests that have not ended. With "abort", they end with the finish reason "abort";
                with "wait", this waits for their ends; with "keep", they go on after `wake_up`, and those that lost
                their memory are computed again from their start.

        Raises:
            ParamsError: there is no such level or mode.
            ConfigError: ranks share the model.
            EngineDeadError: the engine has died.
        """
        await self._sleep(level_of(level), mode_of(mode))

    async def _sleep(self, level: int, mode: PauseMode, refuses: bool | None = None) -> None:
        before = self.sleep_level
        self._outbox.flush()
        await self._ask(lambda number: Sleep(number, level, mode, refuses))
        self._level = max(before, level)

    async def wake_up(self, tags: Collection[str] | None = None) -> None:
        """Take the memory again that `sleep` gave back; `tags` as for LLM.wake_up.

        Raises:
            ParamsError: a tag is unknown.
            ModelError, CapacityError: it sleeps on.
            EngineDeadError: the engine has died.
        """
        await self._wake(parts_of(tags))

    async def _wake(self, parts: frozenset[EnginePart], *, again: bool = False) -> None:
        def order(number: int) -> WakeUp:
            self._waking.add(number)
            return WakeUp(number, parts, again)

        await self._ask(order)

    @property
    def waking_until(self) -> float:
        """When the last wake-up ended, on the monotonic clock; infinity during one, which may be silent for minutes."""
        return math.inf if self._waking else self._woken_s

    def _end_waking(self, number: int) -> None:
        """Note that a message was answered; nothing happens unless it was one to wake up."""
        if number in self._waking:
            self._waking.remove(number)
            self._woken_s = time.monotonic()

    async def is_sleeping(self) -> bool:
        """True if it must wake up before it answers."""
        return bool(self._lacks)

    @property
    def sleep_level(self) -> int:
        """The level at which it lacks memory; 0 while it has all."""
        return self._level if self._lacks & MEMORY else 0

    async def weight_checksums(self) -> dict[str, str]:
        """The SHA-256 of each tensor of weights, by dp{engine}:pp{stage}:pcp0:tp{rank}:{name}; adapters are left out.

        Raises:
            AsleepError: it sleeps.
            EngineDeadError: the engine has died.
        """
        checked: WeightsChecked = await self._ask(lambda number: self._silent(CheckWeights(number)))
        return dict(checked.digests)

    async def reset_weights(self) -> None:
        """Make all weights zero, so that answers are worthless until they are read again: `reload_weights`.

        It happens between two steps; an engine that is paused stays paused.

        Raises:
            AsleepError: it sleeps.
            ConfigError: ranks share the model, and could not read them again.
            EngineDeadError: the engine has died.
        """
        await self._ask(lambda number: self._silent(CheckWeights(number, reset=True)))

    async def reload_weights(self) -> None:
        """Read the weights from their files, as they are now; requests go on from their start.

        It happens between two steps, and new requests wait meanwhile. Nothing else changes: an engine that is paused
        stays paused, and one that sleeps takes the memory of its weights alone, as `wake_up(["weights"])`.

        Raises:
            ConfigError: ranks share the model.
            ModelError, CapacityError: they cannot be read; it sleeps until `wake_up` can.
            EngineDeadError: the engine has died.
        """
        self._outbox.flush()
        try:
            await self._wake(frozenset({EnginePart.WEIGHTS}), again=True)
        finally:
            if self._lacks >= MEMORY:
                # They could not be read: it has given back all.
                self._level = 2

    def _silent(self, message: CheckWeights) -> CheckWeights:
        """Note that the engine may say nothing for minutes."""
        self._waking.add(message.number)
        return message

    async def start_profile(self, profile_prefix: str | None = None) -> None:
        """Begin to record what the engine computes, with torch's profiler.

        Raises:
            ParamsError: it has begun.
        """
        await self._ask(Profile)

    async def stop_profile(self) -> None:
        """End the record and write it into the folder that profiler_config, else BEHELD_PROFILES, names.

        Raises:
            ParamsError: nothing is recorded.
        """
        folder = self._profiles or env.PROFILES()
        await self._ask(lambda number: Profile(number, folder))

    async def pause_generation(
        self, *, mode: str = "abort", wait_for_inflight_requests: bool = False, clear_cache: bool = True
    ) -> None:
        """Pause: `sleep` at level 0, by the name that trainers use; with `clear_cache`, prefixes are forgotten.

        With the mode "keep" new requests wait, too. With "abort" and "wait" they are refused from now on (PausedError),
        so that none is answered with other weights than its client knows of.

        Raises:
            ParamsError: there is no such mode.
            EngineDeadError: the engine has died.
        """
        chosen = mode_of(PauseMode.WAIT if wait_for_inflight_requests else mode)
        await self._sleep(0, chosen, chosen is not PauseMode.KEEP)
        if clear_cache:
            self.reset_prefix_cache()

    async def resume_generation(self) -> None:
        """Go on after `pause_generation`."""
        await self.wake_up([EnginePart.SCHEDULING])

    async def is_paused(self) -> bool:
        """True if no step is computed, for whatever reason."""
        return bool(self._lacks)

    async def _ask(self, message: Callable[[int], _Asked]) -> Any:
        """Send a message with a new number and wait for its answer."""
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

    async def token_ids(self, prompt: PromptType, *, client: str = "", add_special_tokens: bool = True) -> list[int]:
        """The token ids of a prompt without media, as `generate` sees them.

        Without `add_special_tokens`, those of the text alone; `client` as for `generate`.
        """
        if isinstance(prompt, str) and not add_special_tokens:
            return await self._preparation.run(client, self._inputs.reader.text_ids, prompt, of=prompt)
        order = RequestOrder(prompt, self._cheapest(), "tokens", client=client)
        return list((await self._preparation.prepared(order)).token_ids)

    async def chat_token_ids(self, messages: Messages, *, client: str = "", **options: Any) -> list[int]:
        """The token ids of a conversation, including those of its media; `client` as for `generate`."""
        order = RequestOrder(Chat(messages, **options), self._cheapest(), "tokens", client=client)
        return list((await self._preparation.prepared(order)).token_ids)

    def _cheapest(self) -> Params:
        """Parameters of a request of which only the prompt is wanted."""
        return SamplingParams(max_tokens=1) if self.info.pooler is None else PoolingParams()

    async def text_of(self, token_ids: Sequence[int], *, client: str = "") -> str:
        """The text of token ids, with special tokens; `client` as for `generate`.

        Raises:
            ParamsError: an id is not in the vocabulary, or there is no tokenizer.
        """
        tokenizer = self._inputs.tokenizer
        if tokenizer is None:
            raise ParamsError("There is no tokenizer.", param="tokens")
        for token in token_ids:
            if not 0 <= token < self.info.num_ids:
                raise ParamsError(
                    f"The token id {token} is out of vocabulary, which has {self.info.num_ids} ids.", param="tokens"
                )
        ids = list(token_ids)
        return str(await self._preparation.run(client, tokenizer.decode, ids, False))

    async def cut(self, text: str, most: int, *, end: bool = False, client: str = "") -> str:
        """The beginning of a text that its first `most` tokens spell; `client` as for `generate`.

        With `end`, the end of the text that makes a prompt of at most `most` tokens, special ones included.

        Raises:
            PromptError: there is no tokenizer, or it does not say where its tokens stand.
        """
        cut = partial(self._inputs.reader.cut, end=end)
        return str(await self._preparation.run(client, cut, text, most, of=text))

    def get_tokenizer(self) -> Any:
        """The checkpoint's tokenizer. Requests use a copy from now on, so changes to it have no effect on them."""
        return self._inputs.share_tokenizer()

    @property
    def tokenizer(self) -> Any:
        """The same for reading only: changes to it would change how requests are tokenized."""
        return self._inputs.tokenizer

    def token_places(self, text: str, *, add_special_tokens: bool) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the ids of a text, and from where to where in it each token stands. Any thread may call this.

        Raises:
            PromptError: the tokenizer does not say that, or fails.
        """
        return self._inputs.reader.token_places(text, add_special_tokens=add_special_tokens)

    @property
    def reads_extra_args(self) -> bool:
        """Whether a loaded class may read the `extra_args` of requests."""
        return self._inputs.reads_extra_args

    @property
    def chat_template(self) -> str | None:
        """The template for conversations with tools; None if there is none."""
        return self._inputs.chat_template

    @property
    def scoring_template(self) -> str | None:
        """The text of the template that makes the prompt of a pair: the engine's, or the model's own; None without."""
        own = "" if self.info.pooler is None else self.info.pooler.pair_template
        return self._scoring_template or own or None

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters that the model's generation_config.json recommends."""
        return self._defaults.clone()

    def reset_prefix_cache(self) -> None:
        """Clear the prefix cache."""
        self._engine.send(ClearCache())

    @property
    def alive(self) -> bool:
        """False after the engine died or was closed."""
        return self._engine.alive

    @property
    def reason(self) -> str:
        """Why the engine is not alive."""
        return self._reason

    @property
    def num_live(self) -> int:
        """Number of submitted sequences that have not ended."""
        return len(self._live)

    @property
    def num_open(self) -> int:
        """Number of requests whose generators have begun and not ended, also before they are submitted."""
        return self.host.num_asking

    def close(self) -> None:
        """Abort all requests, end the engine and free its memory."""
        self._engine.close()
        self._fail_all()
        self._preparation.close()
        self._inputs.close()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    # ------------------------------------------------------------------ one request

    async def _answer(self, asked: UserRequest) -> AsyncGenerator[Any, None]:
        with self.host.asking(asked.client):
            live = await self._submit(asked)
            prepared = asked.prepared
            # The input may be large, and the answer may take long.
            del asked
            prepared()
            try:
                while True:
                    output = await live.next_output()
                    yield output
                    if output.finished:
                        return
            finally:
                self._forget(live)

    async def _submit(self, asked: UserRequest) -> LiveRequest:
        self._check_alive()
        if self._lacks & MEMORY:
            # Before media are fetched and prepared.
            raise AsleepError("The engine sleeps.", "Wake it up first: wake_up(), or POST /wake_up.")
        self._attach()
        started = time.monotonic()
        number = next(self._numbers)
        name = str(number) if asked.request_id is None else asked.request_id
        chosen = self.get_default_sampling_params() if asked.params is None else asked.params
        chosen.verify()
        self._check_name(name)
        seed = seed_of(chosen, self.config.seed, number)
        order = RequestOrder(
            asked.prompt,
            chosen,
            name,
            asked.lora,
            asked.priority,
            started,
            asked.client,
            seed,
            grounding=asked.grounding,
        )
        first = await self._preparation.prepared(order)
        if asked.pieces is Pieces.FINAL:
            first = _read_at_end(first, chosen)
        requests = answers(first, chosen, seed)
        tokenizer = self._inputs.tokenizer
        collector = collector_of(name, chosen, requests, tokenizer, asked.marks, lazy_prompt=asked.lazy_prompt)
        ids = tuple(request.id for request in requests)
        longest = first.params.max_tokens if isinstance(first.params, Sampling) else None
        live = LiveRequest(collector, ids, asked.pieces, started, time.monotonic(), longest)
        self._check_alive()
        self._live.add(live)
        if isinstance(chosen, PoolingParams) and not first.spans:
            self._outbox.add(first)
        else:
            self._engine.send(Submit(tuple(requests)))
        return live

    def _begin(self, request: Request, params: Params, started: float) -> LiveRequest:
        """Submit a prepared request whose answer is read only once it is complete."""
        self._check_alive()
        collector = collector_of(request.id, params, [request], self._inputs.tokenizer)
        live = LiveRequest(collector, (request.id,), Pieces.FINAL, started, time.monotonic())
        self._live.add(live)
        self._engine.send(Submit((_read_at_end(request, params),)))
        return live

    def _forget(self, live: LiveRequest) -> None:
        """Clean up after the generator's end, for any reason; abort what still runs."""
        if left := self._live.drop(live):
            self._outbox.flush()
            self._engine.send(Abort(left))

    # ------------------------------------------------------------------ news from the engine

    def _receive(self, reply: Reply) -> None:
        """Called in a thread of the engine's side."""
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._take, reply)

    def _take(self, reply: Reply) -> None:
        if isinstance(reply, Events):
            now = time.monotonic()
            for event in reply.events:
                self._live.push(event, now)
        elif isinstance(reply, Pong | LoRAAdded | LoRAsManaged | Asleep | Profiled | WeightsChecked):
            if isinstance(reply, Asleep):
                self._lacks = reply.lacks
            if isinstance(reply, Asleep | WeightsChecked):
                self._end_waking(reply.number)
            waiting = self._asked.get(reply.number)
            if waiting is None or waiting.done():
                return
            if isinstance(reply, Pong):
                waiting.set_result(reply.stats)
            elif reply.error is not None:
                waiting.set_exception(reply.error)
            else:
                waiting.set_result(reply)
        elif isinstance(reply, WakingUp):
            self._waking.add(reply.number)
        elif isinstance(reply, Unread):
            if reply.number is not None:
                self._end_waking(reply.number)
            self._fail(reply.request_ids, reply.number)
        elif isinstance(reply, Died):
            self._reason = f"The engine has died ({reply.reason})."
            self._fail_all()

    def _fail(self, request_ids: Sequence[str], number: int | None) -> None:
        """Fail these requests: a message from or to them is lost."""
        error = StepError("A message between the server and its engine could not be read.", "Try again.")
        self._live.fail(error, request_ids)
        waiting = None if number is None else self._asked.get(number)
        if waiting is not None and not waiting.done():
            waiting.set_exception(error)

    def _fail_all(self) -> None:
        error = EngineDeadError(self._reason, "Start it again.")
        self._live.fail(error)
        for waiting in self._asked.values():
            if not waiting.done():
                waiting.set_exception(error)

    # ------------------------------------------------------------------ how

    def _check_name(self, name: str) -> None:
        if self._live.named(name) is not None or name in self._in_parts:
            raise ParamsError(f"A request with the id {name!r} is still running.", param="request_id")

    def _check_alive(self) -> None:
        if not self._engine.alive:
            raise EngineDeadError(self._reason, "Start it again.")

    def _attach(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            assert not self._live, "requests are live in another event loop"
            self._loop = loop
        return loop
