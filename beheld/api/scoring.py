"""Scores of pairs: what a user gives, the prompts that are made of it, and the scores of vectors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from beheld.core.errors import ParamsError
from beheld.core.outputs import PoolingOutput, PoolingRequestOutput, ScoringRequestOutput
from beheld.core.pooling import PoolerInfo
from beheld.inputs.pipeline import Chat, Pair, PromptType

Scored = str | Mapping[str, Any]

# Texts one after another, with each item's placeholder where it stands.
_JOINED = "{%- for message in messages -%}{{- message.content -}}{%- endfor -%}"


def pairs(first: Any, second: Any) -> tuple[list[Scored], list[Scored]]:
    """Return both sides of all pairs, equally long: one to one, one to many, or many to as many.

    Raises:
        ParamsError: the numbers differ, or an entry is neither a text nor a mapping with content or a prompt.
    """
    sides = [_entries(name, side) for name, side in (("data_1", first), ("data_2", second))]
    left, right = sides
    if len(left) == 1:
        left = left * len(right)
    if len(left) != len(right):
        raise ParamsError(
            f"There are {len(left)} entries to compare with {len(right)}.",
            "Give one and many, or as many on both sides.",
            param="data_1",
        )
    return left, right


def _entries(name: str, side: Any) -> list[Scored]:
    given = list(side) if isinstance(side, list | tuple) else [side]
    if isinstance(side, Mapping) and isinstance(side.get("content"), list | tuple) and set(side) == {"content"}:
        # An older form: one mapping with a list of many single parts.
        given = [{"content": [part]} for part in side["content"]]
    if not given:
        raise ParamsError(f"{name} is empty.", "Give a text.", param=name)
    for entry in given:
        if not isinstance(entry, str) and not (
            isinstance(entry, Mapping) and {"content", "prompt", "prompt_token_ids"} & set(entry)
        ):
            raise ParamsError(
                f"{name} holds {type(entry).__name__}, which cannot be scored.",
                'Give texts, or {"content": [parts of a chat message]}.',
                param=name,
            )
    return given


def crosses(info: PoolerInfo) -> bool:
    """Return whether the model reads both sides of a pair at once.

    Raises:
        ParamsError: it gives scores, but of several classes.
    """
    if not info.scores:
        return False
    if info.task != "classify" or info.width != 1:
        raise ParamsError(
            f"This model gives scores of {info.width} classes, and none of a pair.", "Use classify.", param="model"
        )
    return True


def prompt_of(entry: Scored) -> PromptType | Chat:
    """Return the prompt of one side, for a model of vectors."""
    if isinstance(entry, str) or "content" not in entry:
        return entry
    return Chat([{"role": "user", "content": entry["content"]}], chat_template=_JOINED, content_format="string")


def prompt_of_pair(
    first: Scored, second: Scored, chat_template: str | None, template_kwargs: Mapping[str, Any] | None = None
) -> Chat | Pair:
    """Return the one prompt of a pair: a template's, whose messages have the roles query and document, or both texts.

    Raises:
        ParamsError: a side is neither a text nor a mapping with content.
    """
    if chat_template is None and isinstance(first, str) and isinstance(second, str):
        return Pair(first, second)
    messages = []
    for role, side in (("query", first), ("document", second)):
        content = side if isinstance(side, str) else side.get("content")
        if content is None:
            raise ParamsError(
                "A pair of this model is given as texts or contents.", 'Write {"content": [parts]}.', param="data_1"
            )
        messages.append({"role": role, "content": content})
    return Chat(
        messages,
        chat_template=chat_template or _JOINED,
        content_format=None if chat_template else "string",
        add_generation_prompt=chat_template is not None,
        template_kwargs=template_kwargs,
    )


def cosines(
    lefts: Sequence[PoolingRequestOutput], rights: Sequence[PoolingRequestOutput]
) -> list[ScoringRequestOutput]:
    """Return the cosine of each pair of vectors; the usage of a pair is that of both sides."""
    import torch.nn.functional as F

    found = []
    for left, right in zip(lefts, rights, strict=True):
        error = left.error or right.error
        both = None
        if error is None:
            both = PoolingOutput(F.cosine_similarity(left.outputs.data, right.outputs.data, dim=0))
        found.append(
            ScoringRequestOutput.of(
                replace(
                    left,
                    outputs=both,  # type: ignore[arg-type]
                    prompt_token_ids=left.prompt_token_ids + right.prompt_token_ids,
                    num_cached_tokens=left.num_cached_tokens + right.num_cached_tokens,
                    media=[*left.media, *right.media],
                    error=error,
                )
            )
        )
    return found
