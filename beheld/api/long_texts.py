"""Vectors of texts that are longer than a model reads: of their parts, and the mean of those."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from beheld.api.collectors import failed
from beheld.api.per_prompt import value_at
from beheld.core.errors import UserError
from beheld.core.outputs import PoolingOutput, PoolingRequestOutput
from beheld.core.pooling import PoolerInfo
from beheld.core.pooling_params import PoolingParams
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

    It has no vector if one of the parts has none. That of a single part is the part's own.
    """
    import torch
    import torch.nn.functional as F

    made = replace(outputs[0], request_id=request_id, prompt=text_of(prompt))
    if len(outputs) == 1:
        return made
    made = replace(
        made,
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


class DividedPrompts:
    """Prompts of which the long ones are read in parts: what the engine reads, and the outputs of the prompts.

    Args:
        prompts: all of a call.
        params: one for all, or one per prompt.
        info: how the model pools.
        most: how many ids it reads at once.
        ids_of: returns the ids of a long prompt.
        keep_errors: whether the error of a prompt becomes its output.

    Attributes:
        parts: what the engine reads.
        params: those of each part.

    Raises:
        UserError: a long prompt cannot be read.
    """

    def __init__(
        self,
        prompts: Sequence[Any],
        params: PoolingParams | Sequence[PoolingParams],
        info: PoolerInfo,
        most: int,
        ids_of: Callable[[Any, PoolingParams], Sequence[int]],
        *,
        keep_errors: bool,
    ) -> None:
        self._info = info
        self._prompts = [(prompt, value_at(params, index)) for index, prompt in enumerate(prompts)]
        self._errors: dict[int, UserError] = {}
        self._parts: list[list[Any]] = []
        self.params: list[PoolingParams] = []
        # By object: prompts in a row with the same one are prepared together.
        lone: dict[int, PoolingParams] = {}
        for index, (prompt, own) in enumerate(self._prompts):
            parts = [prompt]
            if may_be_long(prompt, own, info, most):
                try:
                    parts = parts_of(prompt, ids_of(prompt, own), most)
                except UserError as error:
                    if not keep_errors:
                        raise
                    self._errors[index], parts = error, []
                own = lone.get(id(own)) or lone.setdefault(id(own), alone(own))
            self._parts.append(parts)
            self.params += [own] * len(parts)
        self.parts = [part for parts in self._parts for part in parts]

    def spread(self, values: Any) -> Any:
        """A list with a value for each prompt, as one with a value for each part; a common value as it is."""
        if not isinstance(values, list | tuple):
            return values
        return [value for value, parts in zip(values, self._parts, strict=True) for _ in parts]

    def joined(
        self, outputs: Iterable[PoolingRequestOutput], new_id: Callable[[], str]
    ) -> list[PoolingRequestOutput]:  # fmt: skip
        """The outputs of the prompts from those of the parts.

        Args:
            new_id: makes the name of a prompt that could not be read.
        """
        rest, found = iter(outputs), list[Any]()
        for index, ((prompt, own), parts) in enumerate(zip(self._prompts, self._parts, strict=True)):
            made = list(islice(rest, len(parts)))
            if not made:
                found.append(failed(new_id(), own, self._errors[index]))
            elif parts[0] is prompt:
                found += made
            else:
                found.append(joined(made, made[0].request_id, prompt, own, self._info))
        return found
