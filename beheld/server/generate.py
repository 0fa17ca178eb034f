"""POST /inference/v1/generate: token ids in, token ids out, in vLLM's form."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from beheld.server.errors import HttpError
from beheld.server.generate_schema import GenerateParams, GenerateRequest, TokensCompletion
from beheld.server.json_pieces import LongList
from beheld.server.stream import Chunk


def completion_of(body: GenerateRequest, longest: int | None) -> TokensCompletion:
    """The request as one for a completion of its ids.

    Args:
        longest: the most tokens of prompt and answer, where the request states no length; None if the operator or the
            checkpoint states one.

    Raises:
        HttpError: it asks for a text and for none, or for a stream of what is no part of one.
    """
    given = {name: getattr(body.sampling_params, name) for name in GenerateParams.model_fields}
    if given.pop("detokenize") is False and body.output_mode == "text":
        raise HttpError(
            400, "The output mode 'text' needs detokenize.", "Leave detokenize out.", param="sampling_params.detokenize"
        )
    if given["logprob_token_ids"] and given["logprobs"] is None:
        # Here, unlike in a completion, they alone ask for a report.
        given["logprobs"] = len(given["logprob_token_ids"])
    if given["max_tokens"] is None and longest is not None:
        # As in a chat. A prompt that leaves no room is refused for its length.
        length, keep = len(body.token_ids), given["truncate_prompt_tokens"] or 0
        given["max_tokens"] = max(1, longest - (min(length, keep) if keep > 0 else length))
    if body.stream and given["prompt_logprob_token_ids"] is not None:
        raise HttpError(
            400,
            "prompt_logprob_token_ids are not sent in a stream.",
            "Set stream to false.",
            param="sampling_params.prompt_logprob_token_ids",
        )
    return TokensCompletion.model_construct(
        **given,
        **{name: getattr(body, name) for name in ("model", "stream", "stream_options", "cache_salt", "priority")},
        prompt=body.token_ids,
        return_token_ids=True,
        return_tokens_as_token_ids=True,
    )


async def chunks(
    completion: AsyncGenerator[Chunk, None], *, tells_prompt: bool, mode: str | None = None
) -> AsyncGenerator[Chunk, None]:
    """The chunks of a completion in the form of this route.

    Args:
        completion: the chunks.
        tells_prompt: whether the prompt's ids are given too.
        mode: the request's output mode; "text" gives the answers' texts too.
    """
    shown = {} if mode is None else {"output_mode": mode}
    try:
        async for chunk in completion:
            made: Chunk = {"request_id": chunk["id"], "created": chunk["created"], "model": chunk["model"], **shown}
            made |= {name: chunk[name] for name in ("usage", "warnings") if name in chunk}
            made["choices"] = []
            for choice in chunk["choices"]:
                for name in ("prompt_logprobs", "prompt_token_id_logprobs"):
                    if name in choice:
                        made[name] = choice[name]
                if tells_prompt and "prompt_token_ids" in choice:
                    made["prompt_token_ids"] = choice["prompt_token_ids"]
                if "token_ids" in choice:
                    made["choices"].append(_choice(choice) | ({"text": choice["text"]} if mode == "text" else {}))
            yield made
    finally:
        await completion.aclose()


def _choice(choice: Mapping[str, Any]) -> dict[str, Any]:
    """A choice with its token ids, and log-probabilities as a chat's are written."""
    lists: Mapping[str, Iterable[Any]] | None = choice["logprobs"]
    content: Iterable[Any] | None = None
    if lists is not None:
        long = isinstance(lists["tokens"], LongList)
        content = LongList(partial(_entries, lists)) if long else list(_entries(lists))
    return {
        "index": choice["index"],
        "token_ids": choice["token_ids"],
        "logprobs": None if content is None else {"content": content},
        "finish_reason": choice["finish_reason"],
        "stop_reason": choice["stop_reason"],
    }


def _entries(lists: Mapping[str, Iterable[Any]]) -> Iterator[dict[str, Any]]:
    """A chat's entries of a completion's lists."""
    for token, logprob, likely in zip(lists["tokens"], lists["token_logprobs"], lists["top_logprobs"], strict=True):
        top = [{"token": name, "logprob": value, "bytes": None} for name, value in (likely or {}).items()]
        yield {"token": token, "logprob": logprob, "bytes": None, "top_logprobs": top}


async def folded(parts: AsyncIterator[Chunk]) -> dict[str, Any]:
    """The chunks as one body."""
    choices: dict[int, dict[str, Any]] = {}
    body: dict[str, Any] = {}
    async for chunk in parts:
        body |= {name: value for name, value in chunk.items() if name != "choices"}
        for choice in chunk["choices"]:
            empty: dict[str, Any] = {"token_ids": [], "logprobs": None} | ({"text": ""} if "text" in choice else {})
            known = choices.setdefault(choice["index"], choice | empty)
            known["token_ids"] += choice["token_ids"]
            if "text" in choice:
                known["text"] += choice["text"]
            if choice["logprobs"] is not None:
                entries = (known["logprobs"] or {"content": []})["content"] + choice["logprobs"]["content"]
                known["logprobs"] = {"content": entries}
            known |= {name: choice[name] for name in ("finish_reason", "stop_reason") if choice[name] is not None}
    return body | {"choices": [choices[index] for index in sorted(choices)]}
