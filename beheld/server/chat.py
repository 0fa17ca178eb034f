"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from beheld.api.async_llm import AsyncLLM, Chat, Pieces
from beheld.core.errors import ParamsError
from beheld.core.outputs import CompletionOutput, PoolingRequestOutput, PromptEntries, RequestOutput
from beheld.core.params import SamplingParams
from beheld.core.plan import PromptLogprobs
from beheld.core.request import LoRARequest
from beheld.core.structured_outputs import ReasoningFormat
from beheld.server.answer_marks import AnswerMarks
from beheld.server.chat_order import ChatOrder, is_nonempty
from beheld.server.custom_tools import CustomCalls
from beheld.server.delta_parser import DeltaParser
from beheld.server.json_pieces import SHORT, LongList
from beheld.server.sampling import answer_bytes, tells_usage
from beheld.server.schema import ChatRequest
from beheld.server.stream import LEAST, Chunk, TextChunk, grounding_of, logprobs_of, media_of, usage_of
from beheld.server.tools import ToolUse
from beheld.text.reasoning import ReasoningMarks, Splitter, format_of, splitter
from beheld.text.tools import format_named


@dataclass(frozen=True)
class ChunkHead:
    """The common part of an answer's chunks, and the callbacks of its route.

    Attributes:
        id, created, model: fields of every chunk.
        ended: called at the end of a request with its last output and the number of the answers' tokens.
        lora: the adapter that answers, if any.
        bytes_of: returns the bytes of a token id.
        used: called when the request's body is no longer needed.
        client: the opaque name of the client, see clients.py.
        begun: called with the first output.
        grown: called with the number of the answers' tokens, before there are chunks of the last ones.
    """

    id: str
    created: int
    model: str
    ended: Callable[[RequestOutput | PoolingRequestOutput, int], None]
    lora: LoRARequest | None = None
    bytes_of: Callable[[int], bytes] = lambda token_id: b""
    used: Callable[[], None] = lambda: None
    client: str = ""
    begun: Callable[[RequestOutput], None] = lambda output: None
    grown: Callable[[int], None] = lambda tokens: None


def chunks(
    llm: AsyncLLM,
    body: ChatRequest,
    order: ChatOrder,
    head: ChunkHead,
    salt: str | None,
    forms: AnswerMarks,
    *,
    stepwise: bool = False,
    raw: bool = False,
) -> AsyncGenerator[Chunk, None]:
    """The response to a chat request, in chunks; the last one has the usage.

    Args:
        llm: the engine.
        body: the request.
        order: what the engine is asked for it; nothing else may hold its messages.
        head: the common part of the chunks.
        salt: separates this client's prefix cache from others'.
        forms: how the model writes tool calls and reasoning.
        stepwise: chunks come token by token, as in any stream; otherwise an answer comes at once.
        raw: choices also have the text that the model wrote, as `raw_text`; the request asks for its tokens.
    """
    stepwise = stepwise or body.stream is True
    marks, messages, params, tools, begun = forms.reasoning, order.messages, order.params, order.tools, order.begun
    tells = order.tells_times

    async def count(text: str) -> int:
        return len(await llm.token_ids(text, add_special_tokens=False)) if text else 0

    asked: dict[str, Any] = {
        "lora_request": head.lora,
        "priority": body.priority or 0,
        "client": head.client,
        "prepared": head.used,
    }
    reasoning = None if marks is None else _reasoning_before(params, marks)
    shown = order.shown | {"cache_salt": salt, "reasoning": reasoning}
    if order.beams is not None:
        # The end of the reasoning must be in the text, also where it is a special token.
        skips = params.skip_special_tokens and not (marks is not None and marks.tokens)
        asked |= {"logprobs": params.logprobs, "skip_special_tokens": skips}
        outputs = llm.beam_search(Chat(messages, **shown), order.beams, head.id, **asked)
        return _chunks(outputs, body, head, tools, marks, begun, count, tells_times=tells, stepwise=stepwise, raw=raw)
    outputs = llm.chat(
        messages,
        params,
        head.id,
        pieces=Pieces.DELTA if stepwise else Pieces.FINAL,
        grounding=body.grounding is True,
        lazy_prompt=True,
        # If these are special tokens, they are left out of texts, and the end of the reasoning would not be seen.
        marks=() if marks is None else marks.tokens,
        **asked,
        **shown,
    )
    return _chunks(outputs, body, head, tools, marks, begun, count, tells_times=tells, stepwise=stepwise, raw=raw)


def _times(output: RequestOutput, total: int) -> dict[str, float]:
    """The times of an answer of `total` tokens under vLLM's names; what is not known is left out."""
    queue, prefill, decode = (output.milliseconds.get(stage) for stage in ("queue", "prefill", "decode"))
    found = {"queue_time_ms": queue, "time_to_first_token_ms": prefill, "generation_time_ms": decode}
    if prefill is not None and decode is not None:
        found["mean_itl_ms"] = decode / (total - 1) if total > 1 else None
        found["tokens_per_second"] = 1e3 * total / (prefill + decode) if prefill + decode else None
    return {name: value for name, value in found.items() if value is not None}


async def _chunks(
    outputs: AsyncGenerator[RequestOutput, None],
    body: ChatRequest,
    head: ChunkHead,
    tools: ToolUse,
    marks: ReasoningMarks | None,
    begun: str,
    count: Callable[[str], Awaitable[int]],
    *,
    tells_times: bool = False,
    stepwise: bool = False,
    raw: bool = False,
) -> AsyncGenerator[Chunk, None]:
    """The chunks of the answers, which begin with the text `begun`; `count` returns the number of a text's tokens."""
    parsers: dict[int, DeltaParser] = {}
    calls: dict[int, CustomCalls] = {}
    total = 0
    base = {"id": head.id, "object": "chat.completion.chunk", "created": head.created, "model": head.model}
    of_text = TextChunk.maker(base)
    only_text = not (tells_usage(body) or body.return_token_ids)
    try:
        async for output in outputs:
            if not parsers:
                head.begun(output)
                parsers = {index: _parser(output, tools, marks, body) for index in range(body.n or 1)}
                calls = {index: CustomCalls(tools.custom) for index in parsers}
                opening = {"role": "assistant", "content": begun}
                first: Chunk = {**base, "choices": [_choice(index, opening) for index in parsers]}
                if output.media:
                    first["media"] = media_of(output)
                if tells_usage(body):
                    first["usage"] = usage_of(output, 0)
                if body.return_token_ids:
                    first["prompt_token_ids"] = list(output.prompt_token_ids or ())
                if body.return_prompt_text:
                    first["prompt_text"] = output.prompt
                yield first
                if output.prompt_entries is not None:
                    entries = LongList(partial(prompt_logprobs, output.prompt_entries))
                    yield {**base, "choices": [], "prompt_logprobs": entries}
            for answer in output.outputs:
                total += len(answer.token_ids)
                head.grown(total)
                parser = parsers[answer.index]
                if only_text and parser.reads_nothing and answer.finish_reason is None and not answer.logprobs:
                    if answer.text:
                        yield of_text(answer.index, answer.text)
                    continue
                usage = {"usage": usage_of(output, total)} if tells_usage(body) else {}
                made = _choices(answer, parser, calls[answer.index], body, head.bytes_of, stepwise=stepwise, raw=raw)
                for choice in made:
                    # The receipts say it, too.
                    repeats = choice["finish_reason"] == "repetition" and output.media
                    media = {"media": media_of(output)} if repeats else {}
                    yield {**base, "choices": [choice], **usage, **media}
            if output.finished:
                head.ended(output, total)
                reasoned = 0 if marks is None else sum([await count(one.reasoning) for one in parsers.values()])
                times = {"metrics": _times(output, total)} if tells_times else {}
                yield {**base, "choices": [], "usage": usage_of(output, total, reasoned), **times}
    finally:
        await outputs.aclose()


def _reasoning_before(params: SamplingParams, marks: ReasoningMarks) -> ReasoningFormat | None:
    """The form of the reasoning that comes before a grammar or has a budget; None if there is neither.

    It is also None if the grammar itself contains the end of the reasoning.

    Raises:
        ParamsError: the grammar contains it, and the reasoning has a budget, too.
    """
    grammar, budget = params.structured_outputs, params.thinking_token_budget
    if grammar is None:
        return None if budget is None else format_of(marks)
    if marks.close not in f"{grammar.regex or ''}{grammar.grammar or ''}":
        return format_of(marks)
    if budget is not None and budget >= 0:
        raise ParamsError(
            f"The grammar contains {marks.close!r}, so it says itself when the reasoning ends.",
            "Bound the reasoning in the grammar, or leave thinking_token_budget out.",
            param="thinking_token_budget",
        )
    return None


def _parser(output: RequestOutput, tools: ToolUse, marks: ReasoningMarks | None, body: ChatRequest) -> DeltaParser:
    forced = tools.grammar is not None and tools.grammar.calls is None
    # A grammar of calls begins after the reasoning; otherwise the model may call a tool before it closes the reasoning.
    calls = () if forced or tools.form is None else format_named(tools.form).openings
    split: Splitter | None = None
    if marks is not None:
        nonempty = not forced and is_nonempty(body)
        split = splitter(marks, inside=marks.begins_inside(output.prompt), calls=calls, nonempty=nonempty)
    return DeltaParser(
        split, tools.form, tools.named, tools.schemas, tools.max_calls, short_ids=tools.short_ids, forced=forced
    )


def _choices(
    answer: CompletionOutput,
    parser: DeltaParser,
    calls: CustomCalls,
    body: ChatRequest,
    bytes_of: Callable[[int], bytes],
    *,
    stepwise: bool,
    raw: bool,
) -> list[dict[str, Any]]:
    """The choices of the chunks with the new part of one answer; `stepwise` and `raw` as in `chunks`."""
    deltas = list(parser.push(answer.text))
    if answer.finish_reason is not None:
        deltas += parser.finish()
    if calls.names:
        deltas = list(calls.read(deltas, ended=answer.finish_reason is not None))
    of_tokens: dict[str, Any] = {}
    if answer.logprobs:
        as_ids = body.return_tokens_as_token_ids is True
        entries = partial(
            logprobs_of,
            answer.token_ids,
            answer.logprobs,
            body.top_logprobs or 0,
            bytes_of,
            as_ids=as_ids,
            named=bool(body.logprob_token_ids),
        )
        # Those of all answers come at once where there is no stream.
        candidates = 1 + max(body.top_logprobs or 0, len(body.logprob_token_ids or ()))
        long = not stepwise and len(answer.token_ids) * candidates * (body.n or 1) > SHORT
        of_tokens["logprobs"] = {"content": LongList(entries) if long else list(entries())}
    if body.return_token_ids:
        of_tokens["token_ids"] = list(answer.token_ids)
    if raw:
        of_tokens["raw_text"] = answer.text
    shown = body.include_reasoning is not False
    made = [_choice(answer.index, delta) for delta in deltas if shown or "reasoning" not in delta]
    if of_tokens:
        made = made or [_choice(answer.index, {})]
        made[0] |= of_tokens
    if answer.finish_reason is not None:
        reason = "tool_calls" if parser.called and answer.finish_reason == "stop" else answer.finish_reason
        if not made or "tool_calls" in made[-1]["delta"]:
            # Agents take up a call's arguments and its end apart.
            made.append(_choice(answer.index, {}))
        made[-1] |= {"finish_reason": reason, "stop_reason": answer.stop_reason} | grounding_of(answer)
    return made


def _choice(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def is_open(body: ChatRequest) -> bool:
    """Whether a request asks for log-probabilities of answers and does not say how long those may be."""
    return body.logprobs is True and body.max_completion_tokens is None and body.max_tokens is None


def columns_bytes(
    body: ChatRequest, max_model_len: int, most_prompt: int | None = None, *, kept: bool = False, come: int = 0
) -> int:
    """The most bytes that the log-probabilities of the request's prompt and answers take.

    Args:
        most_prompt: the most tokens of the prompt, if that is known.
        kept, come: as in answer_bytes.
    """
    longest = body.max_completion_tokens if body.max_tokens is None else body.max_tokens
    most = max_model_len if longest is None else max(0, min(longest, max_model_len))
    num_top = (body.top_logprobs or 0) if body.logprobs is True else None
    answers = answer_bytes(body, num_top, most, kept=kept, come=come if is_open(body) else None)
    if body.prompt_logprobs is None:
        return answers
    if most_prompt is None:
        cut = body.truncate_prompt_tokens or 0
        most_prompt = min(max_model_len, cut) if cut > 0 else max_model_len
    return answers + most_prompt * PromptLogprobs.position_bytes(max(0, body.prompt_logprobs))


def prompt_logprobs(entries: PromptEntries) -> Iterator[dict[str, Any] | None]:
    """The entries of a prompt's positions in vLLM's form; the first one is None."""
    for entry in entries:
        yield (
            None
            if entry is None
            else {
                str(k): {"logprob": max(v.logprob, LEAST), "rank": v.rank, "decoded_token": v.decoded_token}
                for k, v in entry.items()
            }
        )
