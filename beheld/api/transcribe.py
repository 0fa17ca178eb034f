"""Speech to text over a running engine: an audio of any length becomes a transcript, window by window."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import math
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from beheld.api.speech_windows import Stretch, compression, cuts, divided
from beheld.api.word_times import last_states, word_groups
from beheld.core.beams import BeamSearchParams
from beheld.core.config import EngineConfig, ModelInfo
from beheld.core.errors import ParamsError, PromptError
from beheld.core.outputs import RequestOutput
from beheld.core.params import RawParams, SamplingParams
from beheld.core.pooling_params import Alignment
from beheld.core.request import LoRARequest
from beheld.core.speech import (
    LANGUAGES,
    SPACELESS,
    SpeechForm,
    SpeechOrder,
    SpeechPiece,
    SpeechSegment,
    SpeechTokens,
    SpeechWord,
)
from beheld.core.value_checks import nearest
from beheld.inputs.pipeline import Chat

# Windows of one audio that are computed at once, where they do not depend on each other.
_AT_ONCE = 8
# Of the text before a window, as many tokens are used as half of the decoder's positions, as in Whisper's own code.
_TEXT_SHARE = 2
_Params = TypeVar("_Params", SamplingParams, BeamSearchParams)


class SpeechEngine(Protocol):
    """What transcribing needs of AsyncLLM, which documents it."""

    @property
    def generate(self) -> Callable[..., AsyncGenerator[RequestOutput, None]]:
        """Answers a prompt."""

    @property
    def chat(self) -> Callable[..., AsyncGenerator[RequestOutput, None]]:
        """Answers a conversation."""

    @property
    def beam_search(self) -> Callable[..., AsyncGenerator[RequestOutput, None]]:
        """Gives the likeliest answers to a prompt or a conversation."""

    info: ModelInfo
    config: EngineConfig

    async def waveform(self, audio: Any, *, client: str = "") -> Any:
        """Decodes an audio."""

    async def token_ids(self, prompt: Any, *, add_special_tokens: bool = True) -> list[int]:
        """Encodes a text."""

    async def text_of(self, token_ids: Sequence[int]) -> str:
        """Decodes tokens."""

    async def aligned(
        self, prompt: Any, alignment: Alignment, request_id: str, *, lora_request: LoRARequest | None, client: str
    ) -> Any:
        """Gives the weights of a prompt's tokens."""

    @property
    def tokenizer(self) -> Any:
        """The tokenizer."""


@dataclass(frozen=True)
class Fallback:
    """When a window is sampled anew with a higher temperature, as in Whisper's own decoding.

    Attributes:
        temperatures: those tried, in order.
        compression: the largest; a text beyond it repeats itself.
        logprob: the smallest average log-probability.
        silence: a window with a greater probability of silence, and a smaller log-probability, has no text.
    """

    temperatures: tuple[float, ...] = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    compression: float = 2.4
    logprob: float = -1.0
    silence: float = 0.6


@dataclass(frozen=True)
class _Window:
    """The answer for one window."""

    token_ids: tuple[int, ...]
    text: str
    average_logprob: float
    temperature: float
    num_prompt_tokens: int
    num_tokens: int
    silence: float | None = None


class Transcription:
    """One transcript in the making.

    Args:
        llm: the engine.
        form: how its family is asked.
        tokens: its tokens, if it is asked by tokens.
        order: what is asked.
        params: sampling; its `temperature` 0 allows a fallback.
        request_id: begins the names of the requests.
        fallback: see Fallback; None for none.
        beams: the words of each window are searched with these; None for the likeliest token at each position.
        lora, client, salt: as for AsyncLLM.generate.
        ended: called at the end of each request with its last output and the number of its tokens.
        decoded: called with the bytes of the samples, which are kept to the end.

    Raises:
        ParamsError, PromptError: the model cannot do what is asked.
    """

    def __init__(
        self,
        llm: SpeechEngine,
        form: SpeechForm,
        tokens: SpeechTokens | None,
        order: SpeechOrder,
        params: SamplingParams,
        request_id: str,
        *,
        fallback: Fallback | None = None,
        beams: BeamSearchParams | None = None,
        lora: LoRARequest | None = None,
        client: str = "",
        salt: str | None = None,
        ended: Callable[[RequestOutput, int], None] = lambda output, count: None,
        decoded: Callable[[int], None] = lambda num_bytes: None,
    ) -> None:
        check(order, form, tokens, llm.info.name)
        if order.words and llm.config.num_ranks > 1:
            raise ParamsError(
                "The times of words are not available on several ranks.",
                "Ask for 'segment', or serve the model with tensor_parallel_size=1 and pipeline_parallel_size=1.",
                param="timestamp_granularities",
            )
        if beams is not None and (order.timestamps or order.words):
            raise ParamsError(
                "Times are not searched with beams.",
                "Set response_format to json or text, or leave use_beam_search out.",
                param="use_beam_search",
            )
        self._llm, self._form, self._tokens, self._order = llm, form, tokens, order
        # What a window's log-probabilities are compared with holds for the model's own.
        self._params, self._fallback, self._beams = RawParams(**vars(params)), fallback, beams
        self._names = (f"{request_id}-{number}" for number in itertools.count())
        self._options: dict[str, Any] = {"client": client, "lora_request": lora}
        self._ended, self._decoded = ended, decoded
        self._salt: dict[str, Any] = {} if salt is None else {"cache_salt": salt}

    async def pieces(self, audio: Any) -> AsyncGenerator[SpeechPiece, None]:
        """Transcribe an audio: bytes of a file, a URL, a path, or (samples, rate).

        Raises:
            UserError, EngineError: the audio cannot be read, or a request failed.
        """
        wave = await self._llm.waveform(audio, client=self._options["client"])
        self._decoded(wave.samples.nbytes)
        whole = {"seconds": wave.seconds, "given": dict(wave.given)}
        if self._beams is not None:
            made = self._searched(wave, self._beams)
        elif self._tokens is None:
            made = self._independent(wave, self._form)
        elif not (self._order.timestamps or self._order.words) and wave.seconds <= self._tokens.window_s:
            made = self._one_window(wave, self._tokens)
        else:
            made = self._in_sequence(wave, self._tokens)
        async with contextlib.aclosing(made) as found:
            async for piece in found:
                yield replace(piece, **whole)

    # ------------------------------------------------------------------ models that are asked in words

    async def _independent(self, wave: Any, form: SpeechForm) -> AsyncGenerator[SpeechPiece, None]:
        await self._check_prompt(form)
        windows = list(cuts(wave.samples, wave.rate, form.window_s))
        # A language that the model writes first is no part of the words.
        if len(windows) == 1 and (self._order.language or not form.marker):
            outputs = self._asked((wave.samples, wave.rate), pieces="delta")
            async with contextlib.aclosing(_streamed(outputs, wave.seconds, self._order.language)) as found:
                async for piece in found:
                    yield piece
            return

        def ask(audio: Any) -> AsyncGenerator[RequestOutput, None]:
            return self._asked(audio, pieces="final")

        async with contextlib.aclosing(self._of_windows(wave, windows, ask, form.words)) as found:
            async for piece in found:
                yield piece

    async def _check_prompt(self, form: SpeechForm) -> None:
        if self._order.prompt and form.written:
            # Its words stand in a text whose special tokens count.
            await self._plain_ids(self._order.prompt)

    async def _of_windows(
        self,
        wave: Any,
        windows: Sequence[tuple[int, int]],
        ask: Callable[[Any], AsyncGenerator[RequestOutput, None]],
        words: Callable[[str, SpeechOrder], tuple[str, str]],
    ) -> AsyncGenerator[SpeechPiece, None]:
        """Ask for each window by itself; `words` finds the words and their language in an answer."""
        room = asyncio.Semaphore(_AT_ONCE)

        async def whole(start: int, stop: int) -> RequestOutput:
            async with room:
                return await _last(ask((wave.samples[start:stop], wave.rate)))

        tasks = [asyncio.ensure_future(whole(*window)) for window in windows]
        try:
            for index, ((start, stop), task) in enumerate(zip(windows, tasks, strict=True)):
                output = await task
                answer = output.outputs[0]
                spoken, language = words(answer.text, self._order)
                text = spoken.strip()
                segment = SpeechSegment(index, start / wave.rate, stop / wave.rate, text)
                shown = text if not index or not text or language in SPACELESS else " " + text
                count = len(answer.token_ids)
                yield SpeechPiece(shown, (segment,), language, 0.0, output.usage.prompt_tokens, count)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    # ------------------------------------------------------------------ beams

    async def _searched(self, wave: Any, beams: BeamSearchParams) -> AsyncGenerator[SpeechPiece, None]:
        """Search the likeliest words of each window."""
        tokens, form, language = self._tokens, self._form, ""
        windows = list(cuts(wave.samples, wave.rate, form.window_s if tokens is None else tokens.window_s))
        prompt: list[int] = []
        if tokens is None:
            await self._check_prompt(form)
        else:
            start, stop = windows[0]
            language = await self._language((wave.samples[start:stop], wave.rate), tokens)
            prompt = await self._prompt(language, tokens, timestamps=False)

        def words(text: str, order: SpeechOrder) -> tuple[str, str]:
            return form.words(text, order) if tokens is None else (text, language)

        def ask(audio: Any) -> AsyncGenerator[RequestOutput, None]:
            asked = self._question(audio) if tokens is None else self._decoder_prompt(prompt, audio)
            bounded = self._bounded(beams, audio)
            return self._counted(self._llm.beam_search(asked, bounded, next(self._names), **self._options))

        async with contextlib.aclosing(self._of_windows(wave, windows, ask, words)) as found:
            async for piece in found:
                yield piece

    def _asked(self, audio: Any, pieces: str) -> AsyncGenerator[RequestOutput, None]:
        """Ask for the words of one window."""
        asked, options = self._question(audio), self._options | {"pieces": pieces}
        params = self._bounded(self._params, audio)
        if isinstance(asked, Chat):
            return self._counted(self._llm.chat(asked.messages, params, next(self._names), **options, **self._salt))
        return self._counted(self._llm.generate(asked, params, next(self._names), **options))

    def _bounded(self, params: _Params, audio: Any) -> _Params:
        """The parameters with the bound on a window's answer that its length gives, where the model's card has one."""
        samples, rate = audio
        most = self._form.most_tokens(len(samples) / rate)
        if most is None or (params.max_tokens is not None and params.max_tokens <= most):
            return params
        made = copy.copy(params)
        made.max_tokens = most
        return made

    def _question(self, audio: Any) -> dict[str, Any] | Chat:
        """A prompt or a conversation that asks for the words of one window."""
        text = self._form.text(self._order)
        if self._form.written:
            return {"prompt": text, "multi_modal_data": {"audio": audio}, **self._salt}
        if self._order.prompt:
            text += f"\nText before it: {self._order.prompt}"
        # Of some families, the template itself asks.
        content = [{"type": "audio", "audio": audio}, *([{"type": "text", "text": text}] if text else [])]
        return Chat([{"role": "user", "content": content}], **self._salt)

    # ------------------------------------------------------------------ models that are asked by tokens

    async def _one_window(self, wave: Any, tokens: SpeechTokens) -> AsyncGenerator[SpeechPiece, None]:
        """Transcribe a short audio without timestamps."""
        audio = (wave.samples, wave.rate)
        language = await self._language(audio, tokens)
        prompt = await self._prompt(language, tokens, timestamps=False)
        outputs = self._continued(prompt, audio, self._params, "delta")
        async with contextlib.aclosing(_streamed(outputs, wave.seconds, language, strips=True)) as found:
            async for piece in found:
                yield piece

    async def _in_sequence(self, wave: Any, tokens: SpeechTokens) -> AsyncGenerator[SpeechPiece, None]:
        """Transcribe window after window; each starts where the last timestamp of the one before ended."""
        rate, total, seek, index = wave.rate, len(wave.samples), 0, 0
        most = int(tokens.window_s * rate)
        language = await self._language((wave.samples[:most], rate), tokens)
        prompt = await self._prompt(language, tokens, timestamps=True)
        begun = False
        while seek < total:
            samples = wave.samples[seek : seek + most]
            length_s = len(samples) / rate
            made = await self._tried(prompt, (samples, rate), tokens)
            stretches, next_s = divided(made.token_ids, tokens.first, tokens.end, tokens.step_s, length_s)
            stretches = [] if self._silent(made) else [stretch for stretch in stretches if stretch.token_ids]
            words: list[tuple[SpeechWord, ...]] = [()] * len(stretches)
            if self._order.words and stretches:
                times = await self._times(prompt, made, (samples, rate), tokens)
                spaceless = language in SPACELESS
                words = await asyncio.to_thread(self._words, stretches, times, seek / rate, spaceless=spaceless)
            segments: list[SpeechSegment] = []
            for stretch, own in zip(stretches, words, strict=True):
                text = await self._llm.text_of(stretch.token_ids)
                if text.strip():
                    segments.append(self._segment(index, seek / rate, length_s, stretch, text, made, own))
                    index += 1
            # As many samples as the next timestamp says, but never none.
            step = round(next_s * rate)
            seek += step if 0 < step <= len(samples) else len(samples)
            # The model's own blanks divide them, if its language has any.
            shown = "".join(segment.text for segment in segments)
            shown = shown if begun else shown.lstrip()
            begun = begun or bool(shown)
            yield SpeechPiece(shown, tuple(segments), language, 0.0, made.num_prompt_tokens, made.num_tokens)

    async def _times(
        self, prompt: Sequence[int], made: _Window, audio: tuple[Any, int], tokens: SpeechTokens
    ) -> list[tuple[float, float]]:
        """Return when each of a window's text tokens is spoken, (start, stop) in seconds from the window's start.

        A token's weights are those of the position that reads it: what follows it has not been heard yet, so there its
        speech ends, and that of the next token starts.
        """
        (samples, rate), ids = audio, made.token_ids
        # The last token is the end, or has no successor.
        read = ids[:-1] or ids
        per_state = round(rate * tokens.step_s)
        heard = max(1, (len(samples) + per_state // 2 - 1) // per_state)
        alignment = Alignment(tokens.alignment_heads, len(prompt), heard, tokens.median_width)
        asked = self._decoder_prompt([*prompt, *read], audio)
        weights_NE = await self._llm.aligned(asked, alignment, next(self._names), **self._options)
        found = await asyncio.to_thread(last_states, weights_NE)
        found += found[-1:] * (len(ids) - len(found))
        stops = [state * tokens.step_s for state in found]
        both = zip([0.0, *stops], stops, ids, strict=False)
        return [(start, stop) for start, stop, token in both if token < tokens.end]

    def _words(
        self, stretches: Sequence[Stretch], times: Sequence[tuple[float, float]], offset_s: float, *, spaceless: bool
    ) -> list[tuple[SpeechWord, ...]]:
        """Return the words of each segment; `times` are those of their tokens, one segment after another."""

        def decode(ids: list[int]) -> str:
            return str(self._llm.tokenizer.decode(ids, False))

        made, first = [], 0
        for stretch in stretches:
            own = times[first : first + len(stretch.token_ids)]
            first += len(stretch.token_ids)
            made.append(
                tuple(
                    SpeechWord(
                        text.strip(), round(offset_s + own[places[0]][0], 3), round(offset_s + own[places[-1]][1], 3)
                    )
                    for text, places in word_groups(stretch.token_ids, decode, spaceless=spaceless)
                    if text.strip()
                )
            )
        return made

    def _segment(
        self,
        index: int,
        offset_s: float,
        length_s: float,
        stretch: Stretch,
        text: str,
        made: _Window,
        words: tuple[SpeechWord, ...],
    ) -> SpeechSegment:
        return SpeechSegment(
            index,
            round(offset_s + min(stretch.start_s, length_s), 3),
            round(offset_s + min(stretch.stop_s, length_s), 3),
            text,
            stretch.token_ids,
            made.average_logprob,
            compression(made.text),
            made.silence,
            made.temperature,
            offset_s,
            words,
        )

    async def _tried(self, prompt: Sequence[int], audio: Any, tokens: SpeechTokens) -> _Window:
        """Answer a window, again with higher temperatures while it is improbable or repeats itself."""
        rule = self._fallback if self._params.temperature == 0 else None
        silence = None if rule is None or tokens.silence is None else await self._silence(audio, tokens)
        temperatures = (self._params.temperature,) if rule is None else rule.temperatures
        made: _Window | None = None
        prompt_tokens = num_tokens = 0
        for temperature in temperatures:
            params = self._params.clone()
            params.temperature, params.logprobs = temperature, 0
            output = await _last(self._continued(prompt, audio, params, "final"))
            (answer,) = output.outputs
            ids = tuple(answer.token_ids)
            logprobs = [step[token].logprob for step, token in zip(answer.logprobs or (), ids, strict=False)]
            text = await self._llm.text_of([token for token in ids if token < tokens.end])
            prompt_tokens += output.usage.prompt_tokens
            num_tokens += len(ids)
            average = sum(logprobs) / max(1, len(logprobs))
            made = _Window(ids, text, average, temperature, prompt_tokens, num_tokens, silence)
            if rule is None or self._silent(made):
                break
            if compression(text) <= rule.compression and average >= rule.logprob:
                break
        assert made is not None
        return made

    def _silent(self, made: _Window) -> bool:
        """Return whether nothing is spoken in a window, whatever the model wrote."""
        rule = self._fallback
        return rule is not None and (made.silence or 0.0) > rule.silence and made.average_logprob < rule.logprob

    async def _language(self, audio: Any, tokens: SpeechTokens) -> str:
        """Return the language's code: the order's, or the one that the model finds most probable."""
        if self._order.language or not tokens.languages:
            return self._order.language or "en"
        output = await self._one_token(audio, tokens, list(tokens.languages.values()))
        found = output.outputs[0].token_ids[0]
        return next(code for code, token in tokens.languages.items() if token == found)

    async def _silence(self, audio: Any, tokens: SpeechTokens) -> float:
        """Return the probability that nothing is spoken."""
        assert tokens.silence is not None
        output = await self._one_token(audio, tokens, [tokens.silence])
        logprobs = output.outputs[0].logprobs
        assert logprobs, "they were asked for"
        return math.exp(logprobs[0][tokens.silence].logprob)

    async def _one_token(self, audio: Any, tokens: SpeechTokens, allowed: list[int]) -> RequestOutput:
        params = RawParams(temperature=0, max_tokens=1, allowed_token_ids=allowed, logprobs=0, detokenize=False)
        return await _last(self._continued([tokens.start], audio, params, "final"))

    async def _prompt(self, language: str, tokens: SpeechTokens, *, timestamps: bool) -> list[int]:
        """Return the decoder's prompt."""
        earlier: list[int] = []
        if self._order.prompt:
            ids = await self._plain_ids(" " + self._order.prompt.strip())
            earlier = [tokens.before, *ids[1 - self._llm.config.max_model_len // _TEXT_SHARE :]]
        task = tokens.tasks.get("translate" if self._order.translate else "transcribe")
        spoken = [tokens.languages[language]] if tokens.languages else []
        asked = [*spoken, *([] if task is None else [task]), *([] if timestamps else [tokens.plain])]
        return [*earlier, tokens.start, *asked]

    async def _plain_ids(self, text: str) -> list[int]:
        """Return the ids of a part of the order's prompt, which may spell no special token."""
        ids = await self._llm.token_ids(text, add_special_tokens=False)
        if not {*self._llm.tokenizer.get_added_vocab().values()}.isdisjoint(ids):
            raise PromptError("The prompt spells a special token.", "Write plain text.", param="prompt")
        return ids

    def _continued(
        self, prompt: Sequence[int], audio: Any, params: SamplingParams, pieces: str
    ) -> AsyncGenerator[RequestOutput, None]:
        asked = self._decoder_prompt(prompt, audio)
        return self._counted(self._llm.generate(asked, params, next(self._names), pieces=pieces, **self._options))

    def _decoder_prompt(self, prompt: Sequence[int], audio: Any) -> dict[str, Any]:
        return {"prompt_token_ids": list(prompt), "multi_modal_data": {"audio": audio}, **self._salt}

    async def _counted(self, outputs: AsyncGenerator[RequestOutput, None]) -> AsyncGenerator[RequestOutput, None]:
        count = 0
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                count += len(output.outputs[0].token_ids)
                if output.finished:
                    self._ended(output, count)
                yield output


def check(order: SpeechOrder, form: SpeechForm, tokens: SpeechTokens | None, name: str) -> None:
    """Refuse what the model cannot do.

    Raises:
        ParamsError: it names the parameter.
    """
    known = form.codes or LANGUAGES if tokens is None else tokens.languages or {"en": 0}
    if order.language and order.language not in known:
        near = nearest(order.language, known) or f"Known: {', '.join(sorted(known))}."
        raise ParamsError(f"The language {order.language!r} is not one of this model's.", near, param="language")
    translates = bool(form.translate) if tokens is None else "translate" in tokens.tasks
    if order.translate and not translates:
        raise ParamsError(f"{name} does not translate audio.", "Transcribe it.", param="model")
    if order.words and (tokens is None or not tokens.alignment_heads):
        raise ParamsError(
            f"{name} gives no times of words.",
            "Ask for 'segment'. Whisper gives them where generation_config.json has alignment_heads.",
            param="timestamp_granularities",
        )
    if order.prompt and form.written and "{prompt}" not in form.transcribe:
        raise ParamsError(f"{name} takes no prompt for transcripts.", "Leave it out.", param="prompt")


def form_of(llm: Any) -> tuple[SpeechForm, SpeechTokens | None]:
    """Return how the model of an engine is asked for transcripts.

    Raises:
        ParamsError: it makes none.
    """
    if llm.speech is None or "audio" not in llm.info.modalities:
        raise ParamsError(f"{llm.info.name!r} makes no transcripts.", "Ask a model that hears.", param="model")
    form: SpeechForm = llm.speech[0]
    return form, llm.speech[1]


async def _streamed(
    outputs: AsyncGenerator[RequestOutput, None], seconds: float, language: str, *, strips: bool = False
) -> AsyncGenerator[SpeechPiece, None]:
    """Give the words of the only window as they are written, and its segment with the last of them.

    Args:
        strips: the words begin with a blank, which is left out.
    """
    text = ""
    async with contextlib.aclosing(outputs):
        async for output in outputs:
            (answer,) = output.outputs
            new = answer.text.lstrip() if strips and not text else answer.text
            text += new
            segments: tuple[SpeechSegment, ...] = ()
            if output.finished:
                segments = (SpeechSegment(0, 0.0, seconds, text.strip()),)
            count = output.usage.prompt_tokens if output.finished else 0
            yield SpeechPiece(new, segments, language, 0.0, count, len(answer.token_ids))


async def _last(outputs: AsyncGenerator[RequestOutput, None]) -> RequestOutput:
    async with contextlib.aclosing(outputs):
        last = None
        async for output in outputs:
            last = output
    assert last is not None
    return last
