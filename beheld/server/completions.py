"""POST /v1/completions."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any

from beheld.api.async_llm import AsyncLLM, Pieces
from beheld.core.outputs import CompletionOutput, RequestOutput
from beheld.server.chat import ChunkHead
from beheld.server.errors import HttpError
from beheld.server.options import ServerOptions
from beheld.server.sampling import check_answers, sampling
from beheld.server.schema import CompletionRequest
from beheld.server.stream import Chunk, grounding_of, usage_of

Prompt = str | list[int]


def prompts_of(body: CompletionRequest, options: ServerOptions) -> list[Prompt]:
    """The prompts of a request.

    Raises:
        HttpError: there are none, or too many.
    """
    check_answers(body.n, options)
    given: Any = body.prompt
    one = isinstance(given, str) or (bool(given) and isinstance(given[0], int))
    prompts: list[Prompt] = [given] if one else list(given)
    if not prompts:
        raise HttpError(400, "There is no prompt.", "Send a text or token ids.", param="prompt")
    many = len(prompts) * max(1, body.n or 1)
    if many > options.max_answers:
        raise HttpError(
            400,
            f"The request asks for {many} answers; at most {options.max_answers} are allowed.",
            "Send several requests.",
            param="prompt",
        )
    return prompts


def chunks(
    llm: AsyncLLM, body: CompletionRequest, options: ServerOptions, head: ChunkHead, salt: str | None
) -> AsyncGenerator[Chunk, None]:
    """The response to a completion request, in chunks; the last one has the usage. Arguments as for chat.chunks.

    Raises:
        HttpError, ParamsError: fields contradict each other, or one is out of range.
    """
    if body.echo and body.logprobs is not None:
        raise HttpError(400, "echo with logprobs is not supported.", "Use prompt_logprobs.", param="echo")
    prompts = prompts_of(body, options)
    params = sampling(
        body,
        llm.get_default_sampling_params(),
        options,
        max_tokens=body.max_tokens,
        logprobs=body.logprobs,
    )
    pieces = Pieces.DELTA if body.stream else Pieces.FINAL
    streams = [
        llm.generate(
            _prompt(prompt, salt),
            params,
            f"{head.id}-{k}",
            lora_request=head.lora,
            priority=body.priority or 0,
            client=head.client,
            pieces=pieces,
            grounding=body.grounding is True,
        )
        for k, prompt in enumerate(prompts)
    ]

    async def shown(output: RequestOutput) -> str:
        """The prompt as the model saw it."""
        given_as_text = isinstance(prompts[0], str) and body.truncate_prompt_tokens is None
        return (output.prompt or "") if given_as_text else await llm.text_of(output.prompt_token_ids or ())

    return _chunks(streams, body, head, params.n, shown if body.echo else None)


def _prompt(prompt: Prompt, salt: str | None) -> dict[str, Any]:
    name = "prompt" if isinstance(prompt, str) else "prompt_token_ids"
    return {name: prompt} if salt is None else {name: prompt, "cache_salt": salt}


async def _chunks(
    streams: Sequence[AsyncGenerator[RequestOutput, None]],
    body: CompletionRequest,
    head: ChunkHead,
    n: int,
    echoed: Callable[[RequestOutput], Awaitable[str]] | None,
) -> AsyncGenerator[Chunk, None]:
    base = {"id": head.id, "object": "text_completion", "created": head.created, "model": head.model}
    totals = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    cached = 0
    counts: dict[int, int] = {}
    offsets: dict[int, int] = {}
    async with contextlib.aclosing(merged(streams)) as outputs:
        async for number, output in outputs:
            if body.prompt_logprobs is not None and output.prompt_logprobs is not None:
                entries = [
                    None if e is None else {str(k): max(v.logprob, -9999.0) for k, v in e.items()}
                    for e in output.prompt_logprobs
                ]
                yield {**base, "choices": [{"index": number * n, "text": "", "prompt_logprobs": entries}]}
            for answer in output.outputs:
                index = number * n + answer.index
                begun = index in offsets
                before = "" if echoed is None or begun else await echoed(output)
                offsets.setdefault(index, len(before))
                counts[number] = counts.get(number, 0) + len(answer.token_ids)
                choice = _choice(answer, index, before, offsets, wanted=body.logprobs is not None)
                yield {**base, "choices": [choice]}
            if output.finished:
                head.ended(output, counts[number])
                totals["completion_tokens"] += counts[number]
                totals["prompt_tokens"] += usage_of(output, 0)["prompt_tokens"]
                cached += output.num_cached_tokens
    totals["total_tokens"] = totals["prompt_tokens"] + totals["completion_tokens"]
    yield {**base, "choices": [], "usage": {**totals, "prompt_tokens_details": {"cached_tokens": cached}}}


def _choice(
    answer: CompletionOutput, index: int, before: str, offsets: dict[int, int], *, wanted: bool
) -> dict[str, Any]:
    logprobs: dict[str, list[Any]] | None = None
    if wanted and answer.logprobs:
        logprobs = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, candidates in zip(answer.token_ids, answer.logprobs, strict=True):
            own = candidates[token]
            text = own.decoded_token or ""
            logprobs["tokens"].append(text)
            logprobs["token_logprobs"].append(own.logprob)
            logprobs["top_logprobs"].append({c.decoded_token or str(k): c.logprob for k, c in candidates.items()})
            logprobs["text_offset"].append(offsets[index])
            offsets[index] += len(text)
    return {
        "index": index,
        "text": before + answer.text,
        "logprobs": logprobs,
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
        **grounding_of(answer),
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
