"""POST /generative_scoring: how likely some tokens are after a query and each of several items, in vLLM's form."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from typing import Any

from beheld.api.async_llm import AsyncLLM
from beheld.server.errors import HttpError
from beheld.server.generate_schema import GenerativeScoringRequest, ScoredCompletion
from beheld.server.options import ServerOptions
from beheld.server.stream import Chunk


def check(body: GenerativeScoringRequest, options: ServerOptions, num_ids: int) -> None:
    """Raise HttpError if there are too many items, or a label is no token of the vocabulary."""
    if len(body.items) > options.max_answers:
        raise HttpError(
            400,
            f"The request has {len(body.items)} items; at most {options.max_answers} are allowed.",
            "Send several requests.",
            param="items",
        )
    for token in body.label_token_ids:
        if token >= num_ids:
            raise HttpError(
                400,
                f"The token id {token} is out of vocabulary, which has {num_ids} ids.",
                "Send another one.",
                param="label_token_ids",
            )


async def prompts_of(body: GenerativeScoringRequest, llm: AsyncLLM, client: str) -> list[list[int]]:
    """The ids of each prompt: the query's, and the item's behind them or before them."""

    async def ids(given: str | list[int], *, special: bool) -> list[int]:
        return (
            await llm.token_ids(given, client=client, add_special_tokens=special) if isinstance(given, str) else given
        )

    query = await ids(body.query, special=body.add_special_tokens is not False)
    items = await asyncio.gather(*(ids(item, special=False) for item in body.items))
    # Before they are joined: each prompt has the query anew.
    longest = len(query) + max(map(len, items), default=0)
    if longest > llm.config.max_model_len:
        raise HttpError(
            400,
            f"This model's maximum context length is {llm.config.max_model_len} tokens; the query and the longest item "
            f"have {longest}.",
            "Shorten them.",
            param="query" if len(query) > llm.config.max_model_len else "items",
        )
    return [[*item, *query] if body.item_first else [*query, *item] for item in items]


def completion_of(body: GenerativeScoringRequest, prompts: list[list[int]]) -> ScoredCompletion:
    """The request as one for a token after each prompt, with the log-probabilities of the labels."""
    labels = list(dict.fromkeys(body.label_token_ids))
    return ScoredCompletion.model_construct(
        **{name: getattr(body, name) for name in ("model", "cache_salt", "priority")},
        prompt=prompts,
        max_tokens=1,
        min_tokens=0,
        # A token that ends answers is one, too.
        ignore_eos=True,
        logprobs=len(labels),
        logprob_token_ids=labels,
        return_tokens_as_token_ids=True,
    )


async def folded(parts: AsyncIterator[Chunk], labels: list[int], *, softmax: bool) -> dict[str, Any]:
    """The body of the response: of each item the probability of the first label.

    Args:
        parts: the completion's chunks.
        labels: the tokens.
        softmax: whether it is the probability among the labels, rather than among all tokens.
    """
    body: dict[str, Any] = {}
    scores: dict[int, float] = {}
    async for chunk in parts:
        body |= {name: value for name, value in chunk.items() if name != "choices"}
        for choice in chunk["choices"]:
            if choice["logprobs"] is not None:
                (likely,) = choice["logprobs"]["top_logprobs"]
                scores[choice["index"]] = _score([likely[f"token_id:{label}"] for label in labels], softmax=softmax)
    data = [{"index": index, "object": "score", "score": scores[index]} for index in sorted(scores)]
    name = str(body["id"]).removeprefix("cmpl-")
    return body | {"id": f"generative-scoring-{name}", "object": "list", "data": data}


def _score(logprobs: list[float], *, softmax: bool) -> float:
    if not softmax:
        return math.exp(logprobs[0])
    greatest = max(logprobs)
    return math.exp(logprobs[0] - greatest) / sum(math.exp(each - greatest) for each in logprobs)
