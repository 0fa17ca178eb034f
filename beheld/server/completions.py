"""POST /v1/completions."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from beheld.api.async_llm import AsyncLLM, Pieces
from beheld.core.outputs import CompletionOutput, Logprob, PromptEntries, RequestOutput
from beheld.core.plan import PromptLogprobs
from beheld.server import limits
from beheld.server.chat import ChunkHead, prompt_logprobs
from beheld.server.errors import HttpError
from beheld.server.generate_schema import TokensCompletion
from beheld.server.json_pieces import SHORT, LongList, LongText
from beheld.server.options import ServerOptions
from beheld.server.sampling import (
    answer_bytes,
    beams_of,
    check_answers,
    check_named,
    check_one_length,
    sampling,
    tells_usage,
)
from beheld.server.schema import CompletionRequest
from beheld.server.stream import LEAST, Chunk, grounding_of, token_name, usage_of
from beheld.utils.loop_share import LoopShare

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class Embedded:
    """A prompt of embeddings: base64 of a tensor."""

    text: str


Prompt = str | list[int] | Embedded
# OpenAI's four lists of a choice's tokens, by name.
Lists = dict[str, list[Any]]
# Tokens of a shown prompt in one event of a stream, fewer where each has many candidates.
_SHOWN = 64
# Of a file in base64, a multiple of three.
_BYTES_A_PIECE = 3 << 10


# Fields that are of no use once the parameters are made.
_OF_PLANS = ("prompt_embeds", "structured_outputs", "response_format", "allowed_token_ids", "logit_bias", "vllm_xargs")


def prompts_of(body: CompletionRequest, options: ServerOptions) -> list[Prompt]:
    """The prompts of a request.

    Raises:
        HttpError: there are none, or too many.
    """
    check_answers(body.n, options)
    given: Any = body.prompt
    one = isinstance(given, str) or (bool(given) and isinstance(given[0], int))
    prompts: list[Prompt] = [given] if one else list(given)
    if body.prompt_embeds:
        _check_embedded(body)
        texts = [body.prompt_embeds] if isinstance(body.prompt_embeds, str) else body.prompt_embeds
        prompts = [Embedded(text) for text in texts]
    if not prompts:
        reason = "Either prompt or prompt_embeds must be provided and non-empty."
        raise HttpError(400, reason, "Send a text or token ids as prompt.", param="prompt")
    many = len(prompts) * max(1, body.n or 1)
    if many > options.max_answers:
        raise HttpError(
            400,
            f"The request asks for {many} answers; at most {options.max_answers} are allowed.",
            "Send several requests.",
            param="prompt",
        )
    return prompts


def prompt_columns_bytes(body: CompletionRequest, prompts: Sequence[Prompt], max_model_len: int) -> int:
    """The most bytes that the log-probabilities of the prompts take."""
    num_top = _num_prompt_logprobs(body)
    table = body.prompt_logprob_token_ids if isinstance(body, TokensCompletion) else None
    named = 0 if table is None else table.size * limits.SCORE_BYTES
    if num_top is None:
        return named
    positions = sum(min(max_model_len, _most_tokens(prompt) + 1) for prompt in prompts)
    return named + positions * PromptLogprobs.position_bytes(max(0, num_top))


def answer_columns_bytes(
    body: CompletionRequest,
    num_prompts: int,
    max_model_len: int,
    usual_tokens: int | None,
    *,
    come: int | None = None,
) -> int:
    """The most bytes that the log-probabilities of the answers take.

    Args:
        usual_tokens: the most tokens of an answer if the request does not say; None for no limit.
        come: as in answer_bytes.
    """
    longest = usual_tokens if body.max_tokens is None else body.max_tokens
    most = max_model_len if longest is None else max(0, min(longest, max_model_len))
    return answer_bytes(body, body.logprobs, most, num_prompts, come=come)


def without_prompts(body: CompletionRequest) -> CompletionRequest:
    """The request without its prompts and what its parameters have, which may be large."""
    further = ("prompt_logprob_token_ids",) if isinstance(body, TokensCompletion) else ()
    return body.model_copy(update={"prompt": "", **dict.fromkeys((*_OF_PLANS, *further))})


def _most_tokens(prompt: Prompt) -> int:
    """Return a bound on a prompt's tokens."""
    if isinstance(prompt, Embedded):
        return len(prompt.text)
    # A letter is at most four bytes, and a token at least one.
    return 4 * len(prompt) if isinstance(prompt, str) and not prompt.isascii() else len(prompt)


def _num_prompt_logprobs(body: CompletionRequest) -> int | None:
    """How many candidates are computed for each token of a prompt; None for no log-probabilities."""
    if body.echo and body.logprobs is not None:
        return max(body.logprobs, body.prompt_logprobs or 0)
    return body.prompt_logprobs


def _check_embedded(body: CompletionRequest) -> None:
    """Raise HttpError if a request with embeddings has a prompt besides, or asks for its text."""
    if body.prompt:
        raise HttpError(400, "A request has a prompt or prompt_embeds.", 'Send "prompt": "".', param="prompt")
    if body.echo:
        raise HttpError(400, "prompt_embeds have no text to echo.", "Leave echo out.", param="echo")


def chunks(
    llm: AsyncLLM,
    body: CompletionRequest,
    options: ServerOptions,
    head: ChunkHead,
    salt: str | None,
    turns: LoopShare,
) -> AsyncGenerator[Chunk, None]:
    """The response to a completion request, in chunks; the last one has the usage. Arguments as for chat.chunks.

    `turns` are those of the events that show a prompt in a stream.

    Raises:
        HttpError, ParamsError: fields contradict each other, or one is out of range.
    """
    prompts = prompts_of(body, options)
    beams = beams_of(body, options, body.max_tokens)
    many = 1 if beams is None else beams.beam_width
    as_text, left = isinstance(prompts[0], str), len(prompts)

    def prepared() -> None:
        nonlocal left
        left -= 1
        if not left:
            head.used()

    asked: dict[str, Any] = {
        "lora_request": head.lora,
        "priority": body.priority or 0,
        "client": head.client,
        "prepared": prepared,
    }
    if beams is not None:
        if body.echo and body.logprobs is not None:
            raise HttpError(
                400, "A search has no log-probabilities of the prompt.", "Leave echo or logprobs out.", param="echo"
            )
        asked |= {"logprobs": body.logprobs, "skip_special_tokens": body.skip_special_tokens is not False}
        streams = [
            llm.beam_search(_prompt(prompt, body, salt), beams, f"{head.id}-{k}", **asked)
            for k, prompt in enumerate(prompts)
        ]
    else:
        check_named(body, reports=body.logprobs is not None, remedy="Set logprobs to a number.")
        if body.logprob_token_ids and _only_echo(body):
            raise HttpError(
                400,
                "logprob_token_ids are those of an answer, and max_tokens is 0.",
                "Ask for a token, or leave them out.",
                param="logprob_token_ids",
            )
        own: dict[str, Any] = {
            "max_tokens": body.max_tokens,
            "logprobs": None if body.logprob_token_ids else body.logprobs,
        }
        own["prompt_logprobs"] = _num_prompt_logprobs(body)
        if isinstance(body, TokensCompletion):
            own |= {name: getattr(body, name) for name in ("prompt_logprob_token_ids", "prompt_logprob_start")}
        if _only_echo(body):
            # The engine answers with a token at least, which is not shown.
            own["max_tokens"] = 1
        params = sampling(body, llm.get_default_sampling_params(), options, **own)
        many = params.n
        pieces = Pieces.DELTA if body.stream else Pieces.FINAL
        streams = [
            llm.generate(
                _prompt(prompt, body, salt),
                params,
                f"{head.id}-{k}",
                pieces=pieces,
                grounding=body.grounding is True,
                lazy_prompt=True,
                **asked,
            )
            for k, prompt in enumerate(prompts)
        ]

    async def shown(output: RequestOutput) -> str:
        """The prompt as the model saw it."""
        given_as_text = as_text and body.truncate_prompt_tokens is None
        return (output.prompt or "") if given_as_text else await llm.text_of(output.prompt_token_ids or ())

    echo: Echo | None = None
    if body.echo:
        echo = Echo(shown, llm.text_of, body.logprobs, as_ids=body.return_tokens_as_token_ids is True)
    # Prompts may be large, and the answers may take long: each prompt is let go when it is prepared.
    return _chunks(streams, without_prompts(body), head, many, echo, turns)


def with_max_tokens(body: CompletionRequest) -> CompletionRequest:
    """The body with its max_completion_tokens under the name that all else reads.

    Raises:
        HttpError: it has both.
    """
    if body.max_completion_tokens is None:
        return body
    check_one_length(body)
    return body.model_copy(update={"max_tokens": body.max_completion_tokens, "max_completion_tokens": None})


def _only_echo(body: CompletionRequest) -> bool:
    """Whether the request asks for its prompt alone, as evaluations do for its log-probabilities."""
    return bool(body.echo) and body.max_tokens == 0


@dataclass(frozen=True)
class Echo:
    """How the prompt is shown before the answer.

    Attributes:
        text: the prompt as the model saw it.
        text_of: the text of token ids.
        logprobs: how many candidates are given for each of its tokens; None for no log-probabilities.
        as_ids: whether tokens are written as their ids.
    """

    text: Callable[[RequestOutput], Awaitable[str]]
    text_of: Callable[[Sequence[int]], Awaitable[str]]
    logprobs: int | None
    as_ids: bool = False

    async def tokens(self, output: RequestOutput) -> EchoedTokens | None:
        """The prompt's tokens with their log-probabilities."""
        ids, entries = output.prompt_token_ids or (), output.prompt_entries
        if self.logprobs is None or entries is None:
            return None
        return EchoedTokens(ids, entries, self.logprobs, await self.text_of(ids[:1]), self.as_ids)


@dataclass(frozen=True)
class EchoedTokens:
    """A prompt's tokens with their log-probabilities, made whenever they are read.

    Attributes:
        ids: the tokens.
        entries: the candidates of each; the first has none, as nothing precedes it.
        num_top: how many of them are given.
        first: the first token's text.
        as_ids: tokens are named by their ids.
    """

    ids: Sequence[int]
    entries: PromptEntries
    num_top: int
    first: str
    as_ids: bool

    def rows(self, num_top: int) -> Iterator[tuple[int, str, float | None, dict[int, Logprob] | None, int]]:
        """For each token its id, its text, its log-probability, the best candidates, and where its text begins."""
        offset = 0
        for token, candidates in zip(self.ids, self.entries.best(num_top), strict=True):
            if candidates is None:
                yield token, self.first, None, None, offset
                offset += len(self.first)
                continue
            text = candidates[token].decoded_token or ""
            best = sorted(candidates, key=lambda one: -candidates[one].logprob)[:num_top]
            yield (
                token,
                text,
                candidates[token].logprob,
                {one: candidates[one] for one in dict.fromkeys((*best, token))},
                offset,
            )
            offset += len(text)

    def column(self, name: str) -> Iterator[Any]:
        """The values of one of the lists; each is made alone, since together they are long."""
        for row in self.rows(self.num_top if name == "top_logprobs" else 0):
            yield _entries(*row, as_ids=self.as_ids)[name]

    def lists(self) -> Iterator[Lists]:
        """All four, some tokens at a time."""
        made = _no_lists()
        # With the whole vocabulary, 64 tokens would be millions of candidates at once.
        most = max(1, _SHOWN * limits.FREE_CANDIDATES // max(limits.FREE_CANDIDATES, self.num_top))
        for row in self.rows(self.num_top):
            _add(made, *row, as_ids=self.as_ids)
            if len(made["tokens"]) == most:
                yield made
                made = _no_lists()
        yield made


def _prompt(prompt: Prompt, body: CompletionRequest, salt: str | None) -> dict[str, Any]:
    if isinstance(prompt, Embedded):
        found: dict[str, Any] = {"prompt_embeds": prompt.text}
    else:
        found = {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt}
    more = {"cache_salt": salt, "add_special_tokens": body.add_special_tokens}
    return found | {name: value for name, value in more.items() if value is not None}


async def _chunks(
    streams: Sequence[AsyncGenerator[RequestOutput, None]],
    body: CompletionRequest,
    head: ChunkHead,
    n: int,
    echo: Echo | None,
    turns: LoopShare,
) -> AsyncGenerator[Chunk, None]:
    base = {"id": head.id, "object": "text_completion", "created": head.created, "model": head.model}
    totals = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    cached = total = 0
    counts: dict[int, int] = {}
    offsets: dict[int, int] = {}
    as_ids = body.return_tokens_as_token_ids is True
    # Candidates since the last turn.
    made = 0
    prompts: dict[int, tuple[str, EchoedTokens | None]] = {}
    async with contextlib.aclosing(merged(streams)) as outputs:
        async for number, output in outputs:
            if output.prompt_token_id_logprobs is not None:
                scores = LongText(partial(_as_file, output.prompt_token_id_logprobs))
                yield {**base, "choices": [{"index": number * n, "text": "", "prompt_token_id_logprobs": scores}]}
            if body.prompt_logprobs is not None and output.prompt_entries is not None:
                entries = LongList(partial(prompt_logprobs, output.prompt_entries))
                yield {**base, "choices": [{"index": number * n, "text": "", "prompt_logprobs": entries}]}
            for answer in output.outputs:
                index = number * n + answer.index
                begun = index in offsets
                before, shown = "", None
                if echo is not None and not begun:
                    if number not in prompts:
                        # The prompt's log-probabilities come once, also for several answers.
                        prompts[number] = await echo.text(output), await echo.tokens(output)
                    before, shown = prompts[number]
                offsets.setdefault(index, len(before))
                if body.stream and shown is not None:
                    for lists in shown.lists():
                        choice = {"index": index, "text": before, "logprobs": lists}
                        yield {**base, "choices": [{**choice, "finish_reason": None, "stop_reason": None}]}
                        before, shown = "", None
                        await turns.turn()
                if _only_echo(body):
                    answer = replace(answer, text="", token_ids=[], logprobs=[], finish_reason="length")
                counts[number] = counts.get(number, 0) + len(answer.token_ids)
                total += len(answer.token_ids)
                head.grown(total)
                own: Lists | None = None
                if body.logprobs is not None and answer.logprobs:
                    own = _no_lists()
                    for token, candidates in zip(answer.token_ids, answer.logprobs, strict=True):
                        offsets[index] += _add_candidates(own, token, candidates, offsets[index], as_ids=as_ids)
                        made += len(candidates)
                        if made > SHORT:
                            made = 0
                            await turns.turn()
                # Those of all answers are written together where there is no stream.
                candidates_each = 1 + (body.logprobs or 0)
                long = not body.stream and len(answer.token_ids) * candidates_each * n * len(streams) > SHORT
                choice = _choice(answer, index, before, shown, own, long=long)
                if body.return_token_ids:
                    first = {} if begun else {"prompt_token_ids": list(output.prompt_token_ids or ())}
                    choice |= {"token_ids": list(answer.token_ids), **first}
                usage = {"usage": usage_of(output, counts[number])} if tells_usage(body) else {}
                yield {**base, "choices": [choice], **usage}
            if output.finished:
                head.ended(output, counts[number])
                totals["completion_tokens"] += counts[number]
                totals["prompt_tokens"] += usage_of(output, 0)["prompt_tokens"]
                cached += output.num_cached_tokens
    totals["total_tokens"] = totals["prompt_tokens"] + totals["completion_tokens"]
    yield {**base, "choices": [], "usage": {**totals, "prompt_tokens_details": {"cached_tokens": cached}}}


def _as_file(scores: np.ndarray) -> Iterator[str]:
    """An array as a .npy file, in base64, in pieces."""
    import numpy as np

    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(scores))
    data = scores.reshape(-1).view(np.uint8)
    # Three bytes make four letters, so only the last piece may end with others.
    start = -header.tell() % 3
    yield base64.b64encode(header.getvalue() + data[:start].tobytes()).decode()
    for place in range(start, len(data), _BYTES_A_PIECE):
        yield base64.b64encode(data[place : place + _BYTES_A_PIECE].data).decode()


def _choice(
    answer: CompletionOutput,
    index: int,
    before: str,
    echoed: EchoedTokens | None,
    lists: Lists | None,
    *,
    long: bool,
) -> dict[str, Any]:
    """One choice of a chunk.

    Args:
        before: the prompt's text, if it is shown here.
        echoed: its tokens, if they stand before the answer's.
        lists: the log-probabilities of the answer's tokens, if there are any.
        long: they are long together with those of the other answers.
    """
    logprobs: Mapping[str, Any] | None = lists
    if echoed is not None:
        lists = lists or _no_lists()
        logprobs = {
            name: LongList(partial(echoed.column, name), partial(iter, values)) for name, values in lists.items()
        }
    elif lists is not None and long:
        logprobs = {name: LongList(partial(iter, values)) for name, values in lists.items()}
    return {
        "index": index,
        "text": before + answer.text,
        "logprobs": logprobs,
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
        **grounding_of(answer),
    }


def _add_candidates(lists: Lists, token: int, candidates: Mapping[int, Logprob], offset: int, *, as_ids: bool) -> int:
    """Append a token with its candidates; returns the length of its text."""
    own = candidates[token]
    text = own.decoded_token or ""
    _add(lists, token, text, own.logprob, candidates, offset, as_ids=as_ids)
    return len(text)


def _no_lists() -> Lists:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def _add(
    lists: Lists,
    token: int,
    text: str,
    logprob: float | None,
    candidates: Mapping[int, Logprob] | None,
    offset: int,
    *,
    as_ids: bool,
) -> None:
    """Append a token; what has no probability has the least number that JSON clients expect."""
    entries = _entries(token, text, logprob, candidates, offset, as_ids=as_ids)
    for name, value in entries.items():
        lists[name].append(value)


def _entries(
    token: int,
    text: str,
    logprob: float | None,
    candidates: Mapping[int, Logprob] | None,
    offset: int,
    *,
    as_ids: bool,
) -> dict[str, Any]:
    """A token's entry in each list."""
    likely: dict[str, float] | None = None
    if candidates:
        likely = {}
        # The token itself is the first.
        for k, each in sorted(candidates.items(), key=lambda one: one[0] != token):
            name = token_name(k) if as_ids else each.decoded_token or str(k)
            # Several tokens may have one text, as parts of letters do: the further ones are named by their ids.
            likely[token_name(k) if name in likely else name] = max(each.logprob, LEAST)
    return {
        "tokens": token_name(token) if as_ids else text,
        "token_logprobs": None if logprob is None else max(logprob, LEAST),
        "top_logprobs": likely,
        "text_offset": offset,
    }


async def merged(
    streams: Sequence[AsyncGenerator[RequestOutput, None]],
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """The outputs of several generators as they arrive, with the generator's index; the first failure ends all."""
    if len(streams) == 1:
        async with contextlib.aclosing(streams[0]) as only:
            async for output in only:
                yield 0, output
        return
    ready: asyncio.Queue[tuple[int, RequestOutput | Exception | None]] = asyncio.Queue(maxsize=len(streams))

    async def pump(number: int) -> None:
        end: Exception | None = None
        try:
            async with contextlib.aclosing(streams[number]) as stream:
                async for output in stream:
                    await ready.put((number, output))
        except Exception as error:
            end = error
        await ready.put((number, end))

    tasks = [asyncio.create_task(pump(number)) for number in range(len(streams))]
    left = len(tasks)
    try:
        while left:
            number, news = await ready.get()
            if isinstance(news, Exception):
                raise news
            if news is None:
                left -= 1
            else:
                yield number, news
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
