"""POST /v1/embeddings, /v2/embed, /pooling, /classify, /score and /rerank."""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from beheld.api import scoring
from beheld.api.async_llm import AsyncLLM, Chat, Pair, PromptType
from beheld.api.vector_bytes import to_bytes
from beheld.core.errors import ParamsError
from beheld.core.outputs import PoolingRequestOutput, ScoringRequestOutput
from beheld.core.pooling import PoolerInfo
from beheld.core.pooling_params import PoolingParams, pooling_task
from beheld.server import late_chunking, vector_bodies
from beheld.server.chat import ChunkHead
from beheld.server.chat_messages import message_of, read_as
from beheld.server.embed_schema import EmbedRequest
from beheld.server.errors import HttpError
from beheld.server.options import ServerOptions
from beheld.server.pooling_schema import (
    ClassifyRequest,
    EmbeddingRequest,
    Pooled,
    PoolingRequest,
    RerankRequest,
    ScoredContent,
    ScoredText,
    ScoreRequest,
)
from beheld.server.template_options import template_of
from beheld.utils.part_fields import PartFields

Asked = PromptType | Chat | Pair
Answer = dict[str, Any]
# Of each side of the pairs: text -> what is read of it.
Cuts = tuple[Mapping[str, str], Mapping[str, str]]
NO_CUTS: Cuts = ({}, {})
# Cohere's.
_INPUT_TYPES = ("search_document", "search_query", "classification", "clustering", "image")
_SIDES = (("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"), ("queries", "items"))


@dataclass(frozen=True, eq=False)
class PoolingWork:
    """What a request asks of the engine, and what becomes of the outputs.

    Attributes:
        prompts: each gives one output.
        params: for all of them.
        answer: the response's body, from the outputs in order.
    """

    prompts: Sequence[Asked]
    params: PoolingParams
    answer: Callable[[Sequence[PoolingRequestOutput]], Answer | vector_bodies.VectorBody]


def is_cut(body: Pooled) -> bool:
    """Return whether a request has bounds for `cuts_of`."""
    if isinstance(body, ScoreRequest | RerankRequest):
        return bool(body.max_tokens_per_query or body.max_tokens_per_doc)
    return isinstance(body, EmbedRequest) and body.truncate == "START"


async def cuts_of(llm: AsyncLLM, body: Pooled, client: str) -> Cuts:
    """Return the texts of a pair's sides that the request's bounds cut, or those to embed that lose their beginning.

    Raises:
        HttpError: a side is no text.
        PromptError: the tokenizer cannot cut.
    """
    if isinstance(body, EmbedRequest) and body.truncate == "START":
        most = min(body.max_tokens or llm.config.max_model_len, llm.config.max_model_len)
        return {
            text: await llm.cut(text, most, end=True, client=client) for text in dict.fromkeys(body.texts or ())
        }, {}
    if not isinstance(body, ScoreRequest | RerankRequest):
        return NO_CUTS
    sides = (body.query, body.documents) if isinstance(body, RerankRequest) else _sides_of(body)
    found: list[dict[str, str]] = []
    for name, side in zip(("max_tokens_per_query", "max_tokens_per_doc"), sides, strict=True):
        most, entries = getattr(body, name), side if isinstance(side, list) else [side]
        if most and any(isinstance(entry, ScoredContent) for entry in entries):
            raise HttpError(400, f"{name} cuts texts, and one side has parts.", "Leave it out.", param=name)
        texts = dict.fromkeys(entry if isinstance(entry, str) else entry.text for entry in entries if most)
        found.append({text: await llm.cut(text, most, client=client) for text in texts})
    return found[0], found[1]


def work_of(
    llm: AsyncLLM, body: Pooled, options: ServerOptions, head: ChunkHead, salt: str | None, cuts: Cuts
) -> PoolingWork:
    """Return the work of a request to any of the routes.

    Args:
        llm: the engine.
        body: the request.
        options: the server's options.
        head: the common part of the answer.
        salt: separates this client's prefix cache from others'.
        cuts: see `cuts_of`.

    Raises:
        HttpError, ParamsError: fields contradict each other, or the model does not do this.
    """
    info = llm.info.pooler
    if isinstance(body, ClassifyRequest):
        _check_input(body)
        template_of(body, options)
    given = _given_to_embed(body, options, salt, cuts[0]) if isinstance(body, EmbedRequest) else []
    sides = _sides_of(body) if isinstance(body, ScoreRequest) else None
    if info is None:
        raise HttpError(
            400,
            f"The model {options.names[0]!r} generates text and gives neither vectors nor scores.",
            "Use /v1/chat/completions or /v1/completions. The operator may start it with --runner pooling.",
            param="model",
            code="not_an_embedding_model",
        )
    if body.padding == "max_length" and info.filled_to is None:
        raise HttpError(
            400,
            "The model was trained on texts as they are; filled up, they would have vectors of another kind.",
            "Leave it out: texts are filled up where the model was trained so.",
            param="padding",
        )
    if isinstance(body, EmbedRequest):
        return _embed(body, given, head, llm.config.max_model_len)
    if isinstance(body, RerankRequest):
        return _rerank(llm, body, info, options, head, salt, cuts)
    if sides is not None:
        return _score(llm, body, sides, info, options, head, salt, cuts)
    assert isinstance(body, ClassifyRequest)
    return _pool(llm, body, info, options, head, salt)


async def run(
    llm: AsyncLLM, work: PoolingWork, head: ChunkHead, priority: int, window: int
) -> Answer | vector_bodies.VectorBody:
    """Return the response's body; at most `window` prompts are in the engine at once, and the first error ends all."""
    room = asyncio.Semaphore(window)

    async def one(number: int, prompt: Asked) -> PoolingRequestOutput:
        async with room:
            stream = llm.encode(
                prompt,
                work.params.clone(),
                f"{head.id}-{number}",
                lora_request=head.lora,
                priority=priority,
                client=head.client,
            )
            async with contextlib.aclosing(stream) as outputs:
                async for output in outputs:
                    head.ended(output, 0)
                    return output
        raise AssertionError("a request ended without an output")

    tasks = [asyncio.ensure_future(one(number, prompt)) for number, prompt in enumerate(work.prompts)]
    try:
        outputs = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return await asyncio.to_thread(work.answer, outputs)


# ---------------------------------------------------------------------- what is asked


def _check_input(body: ClassifyRequest) -> None:
    if (body.input is None) == (body.messages is None):
        raise HttpError(400, "The request must have either input or messages.", "Send one of them.", param="input")
    if body.input is not None and not body.input:
        raise HttpError(400, "The input is empty.", "Send a text.", param="input")
    if body.messages is None:
        for name in ("chat_template", "chat_template_kwargs", "add_generation_prompt", "continue_final_message"):
            if getattr(body, name) is not None:
                raise HttpError(400, f"{name} needs messages.", "Send messages, or leave it out.", param=name)


def _prompts(
    body: ClassifyRequest, options: ServerOptions, salt: str | None, template: str | None = None
) -> list[Asked]:
    """Return the prompts; `template` is the model's, for conversations."""
    if body.messages is not None:
        # A vector is made of what is there, and no answer begins. A client's template that is not accepted is not read.
        chosen = template_of(body, options, adds=False)
        fields = PartFields(body.chat_template, template)
        messages = [message_of(message, number, options, fields) for number, message in enumerate(body.messages)]
        read_as(messages, body.media_io_kwargs, options)
        return [Chat(messages, cache_salt=salt, **chosen)]
    given: Any = body.input
    one = isinstance(given, str) or isinstance(given[0], int)
    more = {} if body.add_special_tokens is None else {"add_special_tokens": body.add_special_tokens}
    return [_salted(entry, salt, **more) for entry in ([given] if one else given)]


def _given_to_embed(
    body: EmbedRequest, options: ServerOptions, salt: str | None, cuts: Mapping[str, str]
) -> list[Asked]:
    """Return the prompts of texts, of images, or of contents; one text alone in a content is that text."""
    names = [name for name in ("texts", "images", "inputs") if getattr(body, name) is not None]
    if len(names) != 1:
        raise HttpError(400, "The request must have texts, images or inputs.", "Send one of them.", param="texts")
    if body.truncate == "START" and body.texts is None:
        raise HttpError(400, "Only texts are cut at their start.", "Send END or NONE.", param="truncate")
    if body.texts is not None:
        return [_salted(cuts.get(text, text), salt) for text in body.texts]
    contents: list[list[dict[str, Any]]] = [
        [{"type": "image_url", "image_url": {"url": url}}] for url in body.images or ()
    ]
    contents += [message_of(each, number, options)["content"] for number, each in enumerate(body.inputs or ())]
    return [
        _salted(parts[0]["text"], salt)
        if len(parts) == 1 and parts[0]["type"] == "text"
        else Chat([{"role": "user", "content": parts}], add_generation_prompt=False, cache_salt=salt)
        for parts in contents
    ]


def _embed(body: EmbedRequest, prompts: Sequence[Asked], head: ChunkHead, longest: int) -> PoolingWork:
    """Return the work of Cohere's route. Texts are cut to what the model reads, unless the request forbids that."""
    if body.input_type not in (None, *_INPUT_TYPES):
        raise HttpError(
            400,
            f"Unsupported input_type {body.input_type[:64]!r}.",
            f"Send one of {', '.join(_INPUT_TYPES)}, or leave it out.",
            param="input_type",
        )
    params = _params(body, "embed")
    params.dimensions = body.output_dimension
    if params.truncate_prompt_tokens is None and body.truncate != "NONE":
        params.truncate_prompt_tokens = -1 if body.max_tokens is None else min(body.max_tokens, longest)

    def answer(outputs: Sequence[PoolingRequestOutput]) -> Answer:
        vectors = np.stack([output.outputs.data.numpy() for output in outputs])
        kinds = dict.fromkeys(body.embedding_types or ["float"])
        usage = _usage(outputs)
        of_images = sum(receipt.tokens for output in outputs for receipt in output.media)
        units = {"input_tokens": usage["prompt_tokens"] - of_images, "image_tokens": of_images}
        meta = {"api_version": {"version": "2"}, "billed_units": units}
        found: Answer = {"id": head.id, "model": head.model, "response_type": "embeddings_by_type"}
        found |= {"embeddings": {kind: _in_kind(vectors, kind) for kind in kinds}, "usage": usage, "meta": meta}
        return found if body.texts is None else found | {"texts": body.texts}

    return PoolingWork(prompts, params, answer)


def _in_kind(vectors: np.ndarray, kind: str) -> list[Any]:
    """Return vectors as Cohere names their forms: of eight numbers' signs, "ubinary" makes a byte."""
    if kind == "base64":
        return [_text_of(vector.astype("<f4").tobytes()) for vector in vectors]
    if kind == "float":
        return vectors.tolist()
    packed = np.packbits(vectors > 0, axis=-1)
    return (packed if kind == "ubinary" else (packed.astype(np.int16) - 128)).tolist()


def _salted(entry: str | list[int], salt: str | None, **more: Any) -> PromptType:
    """Return a text, or its tokens, as a prompt; `more` is for texts."""
    if isinstance(entry, str) and salt is None and not more:
        # In this form, texts that arrive together are tokenized together.
        return entry
    made: Any = {"prompt": entry, **more} if isinstance(entry, str) else {"prompt_token_ids": entry}
    return made if salt is None else made | {"cache_salt": salt}


def _params(body: Pooled, task: str | None) -> PoolingParams:
    return PoolingParams(
        task=task,
        use_activation=body.use_activation,
        normalize=body.normalize,
        softmax=body.softmax,
        activation=body.activation,
        dimensions=getattr(body, "dimensions", None),
        truncate_prompt_tokens=body.truncate_prompt_tokens,
    )


def _pool(
    llm: AsyncLLM, body: ClassifyRequest, info: PoolerInfo, options: ServerOptions, head: ChunkHead, salt: str | None
) -> PoolingWork:
    """Return the work of /v1/embeddings, /pooling and /classify: each prompt, or each chunk of it, gives an entry."""
    vectors = "token_embed" if info.chosen == "token_embed" else "embed"
    task = {ClassifyRequest: "classify", EmbeddingRequest: vectors}.get(type(body))
    if isinstance(body, PoolingRequest) and body.task is not None:
        task = pooling_task(body.task)
    prompts = _prompts(body, options, salt, llm.chat_template)
    if isinstance(body, EmbeddingRequest):
        _check_bytes(body)
        vector_bodies.check(body.encoding_format, len(prompts))
    params = _params(body, task)
    chunks = body.late_chunking_params if isinstance(body, EmbeddingRequest) else None
    scaled = info.activate if params.activate is None else params.activate
    if chunks is not None:
        assert isinstance(body, EmbeddingRequest)
        if body.encoding_format in vector_bodies.FORMATS:
            raise HttpError(
                400,
                f"The form {body.encoding_format!r} has no room for the places of late chunks.",
                "Send float or base64.",
                param="encoding_format",
            )
        late_chunking.check(body, task or info.usual, info, llm.tokenizer)
        # The mean comes first.
        params = replace(params, use_activation=False, normalize=None, softmax=None, activation=None)
    shown = {"classify": _classes, vectors: _vectors}.get(task or "") if type(body) is not PoolingRequest else _pooled

    def answer(outputs: Sequence[PoolingRequestOutput]) -> Answer | vector_bodies.VectorBody:
        places: list[Answer] = [{} for _ in outputs]
        if chunks is not None:
            texts: Any = [body.input] if isinstance(body.input, str) else body.input
            special = body.add_special_tokens is not False
            made = [
                late_chunking.chunked(
                    output, *llm.token_places(text, add_special_tokens=special), chunks.chunk_size, activate=scaled
                )
                for output, text in zip(outputs, texts, strict=True)
            ]
            outputs, places = [output for output, _ in made], [metadata for _, metadata in made]
        if isinstance(body, EmbeddingRequest) and body.encoding_format in vector_bodies.FORMATS:
            description = {**_head(head, "list"), "usage": _usage(outputs)} if body.encoding_format == "bytes" else None
            return vector_bodies.packed([output.outputs.data for output in outputs], *_number_type(body), description)
        assert shown is not None
        data = [{"index": index, **shown(output, body, info), **places[index]} for index, output in enumerate(outputs)]
        return {**_head(head, "list"), "data": data, "usage": _usage(outputs)}

    return PoolingWork(prompts, params, answer)


def _sides_of(body: ScoreRequest) -> tuple[Any, Any]:
    """Return both sides, under whichever names they have."""
    sent = {name for names in _SIDES for name in names if getattr(body, name) is not None}
    if sent not in map(set, _SIDES):
        raise HttpError(
            400,
            "The request must have both sides of its pairs.",
            "Send text_1 and text_2, data_1 and data_2, or queries and documents (or items).",
            param=next((names[1] for names in _SIDES if not sent.isdisjoint(names)), "text_1"),
        )
    first, second = next(names for names in _SIDES if sent == set(names))
    return getattr(body, first), getattr(body, second)


def _sides(given: Any, options: ServerOptions, cuts: Mapping[str, str]) -> list[scoring.Scored]:
    return [_side(one, options, cuts) for one in (given if isinstance(given, list) else [given])]


def _side(given: str | ScoredContent | ScoredText, options: ServerOptions, cuts: Mapping[str, str]) -> scoring.Scored:
    if isinstance(given, ScoredContent):
        return {"content": message_of(given, 0, options)["content"]}
    text = given if isinstance(given, str) else given.text
    return cuts.get(text, text)


def _score(
    llm: AsyncLLM,
    body: Pooled,
    sides: tuple[Any, Any],
    info: PoolerInfo,
    options: ServerOptions,
    head: ChunkHead,
    salt: str | None,
    cuts: Cuts,
) -> PoolingWork:
    def answer(scores: Sequence[ScoringRequestOutput]) -> Answer:
        data = [
            {"index": index, "object": "score", "score": output.outputs.score} for index, output in enumerate(scores)
        ]
        return {**_head(head, "list"), "data": data}

    return _pairs(llm, body, sides, info, options, salt, cuts, answer)


def _rerank(
    llm: AsyncLLM,
    body: RerankRequest,
    info: PoolerInfo,
    options: ServerOptions,
    head: ChunkHead,
    salt: str | None,
    cuts: Cuts,
) -> PoolingWork:
    def answer(scores: Sequence[ScoringRequestOutput]) -> Answer:
        order = sorted(range(len(scores)), key=lambda index: -scores[index].outputs.score)
        results = []
        for index in order[: body.top_n or len(order)]:
            found: Answer = {"index": index, "relevance_score": scores[index].outputs.score}
            if body.return_documents is not False:
                found["document"] = _shown(body.documents[index])
            results.append(found)
        meta = {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}}
        return {"id": head.id, "model": head.model, "results": results, "meta": meta}

    return _pairs(llm, body, (body.query, body.documents), info, options, salt, cuts, answer)


def _shown(document: str | ScoredContent | ScoredText) -> Answer:
    if isinstance(document, ScoredContent):
        return {"multi_modal": document.model_dump(exclude_none=True)["content"]}
    return {"text": document if isinstance(document, str) else document.text}


def _pairs(
    llm: AsyncLLM,
    body: Pooled,
    sides: tuple[Any, Any],
    info: PoolerInfo,
    options: ServerOptions,
    salt: str | None,
    cuts: Cuts,
    answer: Callable[[Sequence[ScoringRequestOutput]], Answer],
) -> PoolingWork:
    """Return the work of pairs: one prompt for each if the model reads both sides at once, else one for each side."""
    first, second = scoring.pairs(*(_sides(side, options, cut) for side, cut in zip(sides, cuts, strict=True)))
    variables = dict(getattr(body, "chat_template_kwargs", None) or {})
    if getattr(body, "instruction", None) is not None:
        variables.setdefault("instruction", body.instruction)  # type: ignore[attr-defined]
    scores = scoring.PairScores(first, second, info, llm.scoring_template, variables, salt)
    if getattr(body, "instruction", None) is not None and "instruction" not in (llm.scoring_template or "instruction"):
        raise ParamsError(
            "This model's template has no place for an instruction.", "Leave it out.", param="instruction"
        )
    if variables and not scores.has_template:
        name = "chat_template_kwargs" if getattr(body, "chat_template_kwargs", None) else "instruction"
        raise ParamsError(f"{name} needs a template.", "Leave it out.", param=name)
    return PoolingWork(
        scores.prompts,
        _params(body, scores.task),
        lambda outputs: answer(scores.of(outputs)) | {"usage": _usage(outputs)},
    )


# ---------------------------------------------------------------------- what is answered


def _head(head: ChunkHead, kind: str) -> Answer:
    return {"id": head.id, "object": kind, "created": head.created, "model": head.model}


def _usage(outputs: Sequence[Any]) -> Answer:
    prompt = sum(output.usage.prompt_tokens for output in outputs)
    cached = sum(output.num_cached_tokens for output in outputs)
    details = {"cached_tokens": cached}
    return {"prompt_tokens": prompt, "completion_tokens": 0, "total_tokens": prompt, "prompt_tokens_details": details}


def _numbers(output: PoolingRequestOutput, body: ClassifyRequest) -> Any:
    """Return the values as lists, or as text of their bytes."""
    values = output.outputs.data
    if isinstance(body, EmbeddingRequest) and body.encoding_format == "base64":
        return _text_of(to_bytes(values, *_number_type(body)))
    return values.numpy().tolist()


def _number_type(body: EmbeddingRequest) -> tuple[str, str]:
    """Return the type and the byte order of numbers in bytes."""
    return body.embed_dtype or "float32", body.endianness or "little"


def _check_bytes(body: EmbeddingRequest) -> None:
    """Raise HttpError if the request says how vectors become bytes, and asks for numbers."""
    for name in ("embed_dtype", "endianness"):
        if getattr(body, name) is not None and body.encoding_format not in ("base64", *vector_bodies.FORMATS):
            raise HttpError(400, f"{name} needs bytes.", "Set encoding_format to base64 or bytes.", param=name)


def _text_of(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _vectors(output: PoolingRequestOutput, body: ClassifyRequest, info: PoolerInfo) -> Answer:
    return {"object": "embedding", "embedding": _numbers(output, body)}


def _pooled(output: PoolingRequestOutput, body: ClassifyRequest, info: PoolerInfo) -> Answer:
    return {"object": "pooling", "data": _numbers(output, body)}


def _classes(output: PoolingRequestOutput, body: ClassifyRequest, info: PoolerInfo) -> Answer:
    scores = output.outputs.data.tolist()
    labels = [info.labels[number] for number in info.returned_ids] if info.returned_ids else list(info.labels)
    best = max(range(len(scores)), key=scores.__getitem__)
    label = labels[best] if len(labels) == len(scores) else None
    return {"label": label, "probs": scores, "num_classes": len(scores)}
