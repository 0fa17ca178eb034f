"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from beheld.api.async_llm import AsyncLLM, Chat, Pieces
from beheld.core.beams import BeamSearchParams
from beheld.core.errors import ParamsError
from beheld.core.media import AUDIO_IN_VIDEO
from beheld.core.outputs import CompletionOutput, PoolingRequestOutput, PromptEntries, RequestOutput
from beheld.core.params import SamplingParams
from beheld.core.plan import PromptLogprobs
from beheld.core.request import ForeignTemplate, LoRARequest
from beheld.core.structured_outputs import ReasoningFormat
from beheld.server import limits
from beheld.server.custom_tools import CustomCalls
from beheld.server.delta_parser import DeltaParser
from beheld.server.errors import HttpError
from beheld.server.json_pieces import SHORT, LongList
from beheld.server.options import NONE, ServerOptions
from beheld.server.parser_plugins import add_format, marks_of
from beheld.server.parts_schema import RefusalPart, ThinkingPart
from beheld.server.pooling_schema import ScoredContent
from beheld.server.sampling import answer_bytes, beams_of, check_named, sampling, tells_usage
from beheld.server.schema import ChatRequest, Message, TokenizeRequest
from beheld.server.stream import LEAST, Chunk, TextChunk, grounding_of, logprobs_of, media_of, usage_of
from beheld.server.tools import ToolForm, ToolUse, allowed_only, shown_tools, tool_form, tool_use
from beheld.text.reasoning import FORMATS as REASONING
from beheld.text.reasoning import NONEMPTY, ReasoningMarks, Splitter, format_of, reasoning_of, splitter
from beheld.text.tools import form_of, format_named

# The template variable of models whose reasoning can be made longer or shorter.
EFFORT = "reasoning_effort"
THINKING = "enable_thinking"
# Fields that are of no use once a request is planned.
_OF_PLANS = (
    *("documents", "tools", "chat_template", "mm_processor_kwargs", "media_io_kwargs"),
    *("structured_outputs", "response_format", "allowed_token_ids", "logit_bias", "vllm_xargs"),
)
# That of models that answer by given texts.
DOCUMENTS = "documents"


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


@dataclass(frozen=True)
class AnswerMarks:
    """How the model writes tool calls and reasoning; None if they are not read."""

    calls: ToolForm | None = None
    reasoning: ReasoningMarks | None = None


def answer_marks(llm: AsyncLLM, options: ServerOptions) -> AnswerMarks:
    """What the operator chose, or else what the model's family and its chat template say."""
    template, info = llm.chat_template, llm.info
    if options.reasoning_plugin is not None and options.reasoning_parser is not None:
        marks: ReasoningMarks | None = marks_of(options.reasoning_parser, options.reasoning_plugin, llm.tokenizer)
    else:
        marks = REASONING.get(options.reasoning_parser or reasoning_of(template, info.reasoning_formats) or NONE)
    if options.tool_plugin is not None and options.tool_parser is not None:
        # What marks its calls is not known here, and may be a special token.
        own = add_format(options.tool_parser, options.tool_plugin, llm.tokenizer)
        return AnswerMarks(ToolForm(own, special=True), marks)
    calls = options.tool_parser or form_of(template, info.call_formats)
    return AnswerMarks(tool_form(None if calls == NONE else calls, llm.tokenizer), marks)


def ends_reasoning(llm: AsyncLLM, marks: ReasoningMarks | None) -> bool:
    """True if the server can end reasoning after a budget: each of its marks is one token."""
    own = None if marks is None else format_of(marks)
    if own is None or llm.tokenizer is None:
        return False
    texts = (own.open, own.close)
    return all(len(llm.tokenizer(text, add_special_tokens=False)["input_ids"]) == 1 for text in texts)


@dataclass(frozen=True)
class ChatPlan:
    """What the engine is asked for a chat request.

    Attributes:
        messages: the conversation as the input pipeline takes it. Its media may be large.
        shown: further fields of the conversation.
        params: how the answer is sampled.
        beams: the search in place of that, if there is one.
        tools: how it uses tools.
        begun: the text that the answer begins with.
        tells_times: whether the answer gives its times.
    """

    messages: list[dict[str, Any]]
    shown: dict[str, Any]
    params: SamplingParams
    beams: BeamSearchParams | None
    tools: ToolUse
    begun: str
    tells_times: bool


def plan(llm: AsyncLLM, body: ChatRequest, options: ServerOptions, forms: AnswerMarks) -> ChatPlan:
    """What the engine is asked for a request, whose messages are taken out. It may take long, and runs in any thread.

    Args:
        llm: the engine.
        body: the request.
        options: the server's options.
        forms: how the model writes tool calls and reasoning.

    Raises:
        HttpError, ParamsError: fields contradict each other, or one is out of range.
    """
    form, marks = forms.calls, forms.reasoning
    tools = tool_use(body, form, options.max_tools)
    shows_marks = form is not None and form.special and tools.form == form.name
    _check(body, tools, shows_marks=shows_marks)
    longest = body.max_completion_tokens if body.max_tokens is None else body.max_tokens
    defaults = llm.get_default_sampling_params()
    if defaults.max_tokens == SamplingParams.max_tokens:
        # The checkpoint recommends no length: an answer goes on until the model ends it.
        defaults.max_tokens = None
    beams = beams_of(body, options, llm.config.max_model_len if longest is None else longest, tools.grammar)
    params = sampling(
        body,
        defaults,
        options,
        max_tokens=longest,
        logprobs=(body.top_logprobs or 0) if body.logprobs and not body.logprob_token_ids else None,
        structured_outputs=tools.grammar,
        skip_special_tokens=False
        if shows_marks or (marks is not None and marks.channels is not None)
        else body.skip_special_tokens,
    )
    messages = _turned(body.messages, options)
    read_as(messages, body.media_io_kwargs, options)
    begun = _last_words(messages[-1]) if body.echo else ""
    shown = template_of(body, options) | {"template_kwargs": variables_of(body, llm.chat_template)}
    # Of several answers none has times of its own, and a search has those of its last step.
    tells_times = options.tells_times and (body.n or 1) == 1 and beams is None
    return ChatPlan(messages, shown | {"tools": tools.shown}, params, beams, tools, begun, tells_times)


def without_inputs(body: ChatRequest) -> ChatRequest:
    """The request without what its plan has, which may be large, and which nothing reads while it is answered."""
    kept = {NONEMPTY: True} if _is_nonempty(body) else None
    return body.model_copy(update={**dict.fromkeys(_OF_PLANS), "chat_template_kwargs": kept})


def _is_nonempty(body: ChatRequest) -> bool:
    return (body.chat_template_kwargs or {}).get(NONEMPTY) is True


def chunks(
    llm: AsyncLLM,
    body: ChatRequest,
    plan: ChatPlan,
    head: ChunkHead,
    salt: str | None,
    forms: AnswerMarks,
    *,
    stepwise: bool = False,
) -> AsyncGenerator[Chunk, None]:
    """The response to a chat request, in chunks; the last one has the usage.

    Args:
        llm: the engine.
        body: the request.
        plan: what the engine is asked for it; nothing else may hold its messages.
        head: the common part of the chunks.
        salt: separates this client's prefix cache from others'.
        forms: how the model writes tool calls and reasoning.
        stepwise: chunks come token by token, as in any stream; otherwise an answer comes at once.
    """
    stepwise = stepwise or body.stream is True
    marks, messages, params, tools, begun = forms.reasoning, plan.messages, plan.params, plan.tools, plan.begun

    async def count(text: str) -> int:
        return len(await llm.token_ids(text, add_special_tokens=False)) if text else 0

    asked: dict[str, Any] = {
        "lora_request": head.lora,
        "priority": body.priority or 0,
        "client": head.client,
        "prepared": head.used,
    }
    reasoning = None if marks is None else _reasoning_before(params, marks)
    shown = plan.shown | {"cache_salt": salt, "reasoning": reasoning}
    if plan.beams is not None:
        # The end of the reasoning must be in the text, also where it is a special token.
        skips = params.skip_special_tokens and not (marks is not None and marks.tokens)
        asked |= {"logprobs": params.logprobs, "skip_special_tokens": skips}
        outputs = llm.beam_search(Chat(messages, **shown), plan.beams, head.id, **asked)
        return _chunks(outputs, body, head, tools, marks, begun, count, tells_times=plan.tells_times, stepwise=stepwise)
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
    return _chunks(outputs, body, head, tools, marks, begun, count, tells_times=plan.tells_times, stepwise=stepwise)


def _last_words(message: dict[str, Any]) -> str:
    """The text of the last message if it is the assistant's, with which an answer begins that echoes it."""
    if message["role"] != "assistant":
        return ""
    content = message["content"]
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def _check(body: ChatRequest, tools: ToolUse, *, shows_marks: bool) -> None:
    """Raise HttpError if fields contradict each other."""
    if shows_marks and body.skip_special_tokens:
        raise HttpError(
            400,
            "This model's tool calls begin with a special token, which must not be skipped.",
            "Leave skip_special_tokens out.",
            param="skip_special_tokens",
        )
    formed = body.response_format is not None and body.response_format.type != "text"
    # A call that must be made leaves no content that a response_format could shape.
    strict = tools.grammar is not None and tools.grammar.calls is not None
    if tools.grammar is not None and (body.structured_outputs is not None or (formed and strict)):
        raise HttpError(
            400,
            "tool_choice and a grammar cannot be combined.",
            "Set tool_choice to 'auto' or 'none', or leave the grammar out.",
            param="tool_choice",
        )
    check_named(body, reports=body.logprobs is True, remedy="Set logprobs to true.")
    if body.logprobs is not True and body.top_logprobs is not None:
        raise HttpError(400, "top_logprobs needs logprobs.", "Set logprobs to true.", param="top_logprobs")
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise HttpError(
            400,
            "max_tokens and max_completion_tokens mean the same.",
            "Send one of them.",
            param="max_completion_tokens",
        )


def template_of(body: Any, options: ServerOptions, *, adds: bool = True) -> dict[str, Any]:
    """The options of the template and the processor that the client is trusted to set.

    Args:
        body: a request with messages.
        options: the server's options.
        adds: whether the template starts an answer unless the request says otherwise.
    """
    if body.chat_template is not None and not options.trust_templates:
        raise HttpError(
            400,
            "This server does not accept templates in requests.",
            "The operator may start it with --trust-request-chat-template.",
            param="chat_template",
        )
    if body.chat_template == "":
        raise HttpError(400, "The chat_template is empty.", "Leave it out for the model's own.", param="chat_template")
    check_processor_options(body.mm_processor_kwargs, options)
    going_on = body.continue_final_message is True
    add = body.add_generation_prompt if body.add_generation_prompt is not None else adds and not going_on
    return {
        "chat_template": None if body.chat_template is None else ForeignTemplate(body.chat_template),
        "template_kwargs": body.chat_template_kwargs,
        "mm_processor_kwargs": body.mm_processor_kwargs,
        "add_generation_prompt": add,
        "continue_final_message": going_on,
        "add_special_tokens": body.add_special_tokens is True,
    }


def switches_effort(body: ChatRequest | TokenizeRequest, own: str | None) -> bool:
    """True if the request's template, or else the model's own, has a variable for the reasoning's effort."""
    return EFFORT in _template_text(body, own)


def switches_thinking(body: ChatRequest, own: str | None) -> bool:
    """True if the request's template, or else the model's own, has a variable that switches reasoning off."""
    return THINKING in _template_text(body, own)


def _template_text(body: ChatRequest | TokenizeRequest, own: str | None) -> str:
    return body.chat_template or own or ""


def variables_of(body: ChatRequest | TokenizeRequest, own: str | None) -> dict[str, Any] | None:
    """The variables of the template; `own` is the model's.

    Raises:
        HttpError: the template has no place for documents.
    """
    made: dict[str, Any] = {}
    if body.reasoning_effort is not None and switches_effort(body, own):
        made[EFFORT] = body.reasoning_effort
    thinks = body.enable_thinking if isinstance(body, ChatRequest) else None
    if thinks is not None and THINKING in _template_text(body, own):
        made[THINKING] = thinks
    documents = body.documents if isinstance(body, ChatRequest) else None
    if documents:
        if DOCUMENTS not in _template_text(body, own):
            raise HttpError(
                400,
                "This model's chat template has no place for documents.",
                "Write them in a message.",
                param=DOCUMENTS,
            )
        made[DOCUMENTS] = documents
    return {**made, **(body.chat_template_kwargs or {})} or None


def check_processor_options(given: dict[str, Any] | None, options: ServerOptions) -> None:
    """Raise HttpError if an untrusted client sent processor options."""
    if given and not given.keys() <= set(AUDIO_IN_VIDEO) and not options.trust_processor_options:
        raise HttpError(
            400,
            "This server does not accept processor options in requests.",
            "The operator may start it with --trust-request-mm-kwargs.",
            param="mm_processor_kwargs",
        )


def _turned(given: list[Message], options: ServerOptions) -> list[dict[str, Any]]:
    """The messages as the input pipeline takes them, of which the list then has none.

    They go one by one: to free tens of thousands of parts in one step keeps the interpreter for 40 ms.
    """
    left = given[::-1]
    given.clear()
    made: list[dict[str, Any]] = []
    while left:
        made.append(message_of(left.pop(), len(made), options))
    return made


def message_of(message: Message | ScoredContent, number: int, options: ServerOptions) -> dict[str, Any]:
    """The message as the input pipeline takes it; `number` counts from 0."""
    # Templates read the content of every message, even of one with only tool calls.
    made = {"content": "", **message.model_dump(exclude_none=True)}
    refusal = made.pop("refusal", None)
    if refusal and message.content:
        raise HttpError(400, "A message has both content and a refusal.", "Leave one of them out.", param="messages")
    if refusal:
        # A refusal is the assistant's text; templates have no other field for it.
        made["content"] = refusal
    if not isinstance(message.content, list) or not isinstance(made["content"], list):
        return made
    reasoning: list[str] = []
    for place, (part, plain) in enumerate(zip(message.content, made["content"], strict=True)):
        if isinstance(part, RefusalPart):
            plain["type"], plain["text"] = "text", plain.pop("refusal")
            continue
        if isinstance(part, ThinkingPart):
            reasoning.append(part.thinking)
            continue
        extra = [name for name in part.model_extra or () if name not in AUDIO_IN_VIDEO]
        if extra and not options.trust_processor_options:
            name = extra[0]
            raise HttpError(
                400,
                f"The field {name[:64]!r} is unknown.",
                "If it is a processor option, the operator may start the server with --trust-request-mm-kwargs.",
                param=f"messages.{number}.content.{place}.{name}"[: limits.MAX_NAME],
                code="unknown_field",
            )
        source = plain.get(plain["type"])
        if isinstance(source, str) and plain["type"].endswith("_url"):
            plain[plain["type"]] = {"url": source}
    if reasoning:
        _put_reasoning(made, "".join(reasoning), number)
    return made


def _put_reasoning(made: dict[str, Any], text: str, number: int) -> None:
    """Put the reasoning in an assistant's parts where templates look for it.

    Raises:
        HttpError: the message is not the assistant's, or holds its reasoning twice.
    """
    if made.get("role") != "assistant" or made.get("reasoning") or made.get("reasoning_content"):
        raise HttpError(
            400,
            "Reasoning stands in a part of another's message, or twice in one.",
            "Send it once, as a thinking part or as reasoning of the assistant.",
            param=f"messages.{number}.content",
        )
    made["reasoning_content"] = text
    made["content"] = [part for part in made["content"] if part["type"] != "thinking"] or ""


# Modality -> options of reading a file that a request may set.
_READING = {"video": ("num_frames", "fps")}
_VIDEOS = frozenset(("video", "video_url", "input_video"))


def read_as(
    messages: list[dict[str, Any]], given: Mapping[Any, Mapping[str, Any]] | None, options: ServerOptions
) -> None:
    """Have the videos of messages read with the request's options, where a part has none of its own.

    Raises:
        HttpError: the client is not trusted with options, or there is no such option.
    """
    if given is None or not any(given.values()):
        return
    if not options.trust_processor_options:
        raise HttpError(
            400,
            "This server does not accept options of reading media in requests.",
            "The operator may start it with --trust-request-mm-kwargs.",
            param="media_io_kwargs",
        )
    for modality, own in given.items():
        for name in own:
            if name not in _READING.get(modality, ()):
                raise HttpError(
                    400,
                    f"media_io_kwargs sets {name[:64]!r} for {modality}, which has no such option.",
                    "Set num_frames or fps for video, or leave it out.",
                    param="media_io_kwargs",
                )
    for message in messages:
        for part in message["content"] if isinstance(message["content"], list) else ():
            if part["type"] in _VIDEOS and not part.keys() & set(_READING["video"]):
                part.update(given.get("video", {}))


def tokenize_options(body: TokenizeRequest | ChatRequest, options: ServerOptions, own: str | None) -> dict[str, Any]:
    """The arguments of AsyncLLM.chat_token_ids for a conversation to tokenize; `own` is the model's template.

    Raises:
        HttpError: fields contradict each other.
    """
    if isinstance(body, ChatRequest):
        body = allowed_only(body)
    shows_tools = body.tools and not (isinstance(body, ChatRequest) and body.tool_choice == "none")
    messages = _turned(body.messages or [], options)
    read_as(messages, body.media_io_kwargs, options)
    return template_of(body, options) | {
        "messages": messages,
        "tools": shown_tools(body.tools or (), options.max_tools) if shows_tools else None,
        "template_kwargs": variables_of(body, own),
    }


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
                    entries = LongList(partial(_prompt_logprobs, output.prompt_entries))
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
                for choice in _choices(answer, parser, calls[answer.index], body, head.bytes_of, stepwise=stepwise):
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
        nonempty = not forced and _is_nonempty(body)
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
) -> list[dict[str, Any]]:
    """The choices of the chunks with the new part of one answer; `stepwise` as in `chunks`."""
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


def _prompt_logprobs(entries: PromptEntries) -> Iterator[dict[str, Any] | None]:
    for entry in entries:
        yield (
            None
            if entry is None
            else {
                str(k): {"logprob": max(v.logprob, LEAST), "rank": v.rank, "decoded_token": v.decoded_token}
                for k, v in entry.items()
            }
        )
