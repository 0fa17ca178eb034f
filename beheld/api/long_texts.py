"""Vectors of texts that are longer than a model reads: of their parts, and the mean of those."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from beheld.core.outputs import PoolingOutput, PoolingRequestOutput
from beheld.core.params import PoolingParams
from beheld.core.pooling import PoolerInfo
from beheld.inputs.pipeline import Chat, Pair, PromptType

# The most ids that tokenizers make of one character, and around a text.
_PER_LETTER, _AROUND = 4, 16


def may_be_long(prompt: PromptType | Chat | Pair, params: PoolingParams, info: PoolerInfo | None, most: int) -> bool:
    """Return whether a prompt is to be read in parts if it has more than `most` ids, and may have as many."""
    if (
        info is None
        or info.longest is None
        or (params.task or info.usual) != "embed"
        or isinstance(prompt, Chat | Pair)
    ):
        return False
    given: Any = prompt
    if isinstance(prompt, Mapping):
        if prompt.get("multi_modal_data") or prompt.get("prompt_embeds") is not None:
            return False
        ids = prompt.get("prompt_token_ids")
        given = prompt.get("prompt") if ids is None else ids
    if isinstance(given, str):
        return len(given) * _PER_LETTER + _AROUND > most
    return isinstance(given, Sequence) and len(given) > most


def text_of(prompt: PromptType) -> str | None:
    """Return the text of a prompt; None of one of ids."""
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    return text if isinstance(text, str) else None


def parts_of(prompt: PromptType, ids: Sequence[int], most: int) -> list[PromptType]:
    """Return the prompts of a long prompt's ids, cut after each `most`."""
    salt = prompt.get("cache_salt") if isinstance(prompt, Mapping) else None
    more: Any = {} if salt is None else {"cache_salt": salt}
    return [{"prompt_token_ids": list(ids[at : at + most]), **more} for at in range(0, len(ids), most)]


def alone(params: PoolingParams) -> PoolingParams:
    """Return the parameters of one part: the whole was cut before it was divided."""
    made = params.clone()
    made.truncate_prompt_tokens = None
    return made


def aborted(request_id: str) -> PoolingRequestOutput:
    """Return the output of a part that was not begun before the whole was aborted."""
    return PoolingRequestOutput(request_id, None, [], 0, finished=True)  # type: ignore[arg-type]


def joined(
    outputs: Sequence[PoolingRequestOutput],
    request_id: str,
    prompt: PromptType,
    params: PoolingParams,
    info: PoolerInfo,
) -> PoolingRequestOutput:
    """Return the output of a whole prompt: the mean of its parts' vectors, each as often as the part has ids.

    It has no vector if one of the parts has none.
    """
    import torch
    import torch.nn.functional as F

    made = replace(
        outputs[0],
        request_id=request_id,
        prompt=text_of(prompt),
        prompt_token_ids=[token for output in outputs for token in output.prompt_token_ids],
        num_cached_tokens=sum(output.num_cached_tokens for output in outputs),
    )
    error = next((output.error for output in outputs if output.error is not None), None)
    if any(output.outputs is None for output in outputs):
        # Aborted, or failed.
        return replace(made, outputs=None, error=error)  # type: ignore[arg-type]
    weights_P = torch.tensor([float(len(output.prompt_token_ids)) for output in outputs])
    mean_D = (weights_P / weights_P.sum()) @ torch.stack([output.outputs.data.float() for output in outputs])
    activate = info.activate if params.activate is None else params.activate
    return replace(made, outputs=PoolingOutput(F.normalize(mean_D, dim=-1) if activate else mean_D))
