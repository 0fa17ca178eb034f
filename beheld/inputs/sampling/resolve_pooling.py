"""Resolves a user's PoolingParams to the engine's complete, checked Pooling."""

from __future__ import annotations

from beheld.core.errors import ParamsError
from beheld.core.params import snapshot
from beheld.core.pooling import PoolerInfo
from beheld.core.pooling_params import Pooling, PoolingParams

_PER_POSITION = ("token_embed", "token_classify")
_CALLS = {"embed": "LLM.embed", "token_embed": "LLM.encode", "classify": "LLM.classify", "token_classify": "LLM.reward"}


def resolve(params: PoolingParams, info: PoolerInfo, second: int | None = None) -> Pooling:
    """Return the complete, frozen pooling parameters of one prompt.

    Args:
        params: the user's parameters.
        info: how the model pools.
        second: see Pooling.

    Raises:
        ParamsError: the model does not give this, or a parameter does not suit it.
    """
    params.verify()
    if params.extra_kwargs:
        (name, *_) = params.extra_kwargs
        raise ParamsError(f"{name} is for LLM.score.", "Leave it out.", param="extra_kwargs")
    task = _task(params, info)
    step = params.step_tag_id if params.step_tag_id is not None else info.step_id
    method = info.method
    if task in _PER_POSITION:
        method = "step" if params.step_tag_id is not None else info.token_method
    elif params.step_tag_id is not None:
        raise ParamsError("step_tag_id needs the task 'token_classify'.", "Leave it out.", param="step_tag_id")
    return Pooling(
        task=task,
        method=method,
        activate=info.activate if params.activate is None else params.activate,
        dimensions=_dimensions(params, info, task),
        step_id=step if method == "step" else None,
        returned_ids=_returned(params, info, task),
        second=second,
    )


class CommonPooling:
    """Resolves the parameters of prompts alone; many prompts in a row have the same, which are resolved once.

    Safe to use from several threads.

    Args:
        info: how the model pools.
    """

    def __init__(self, info: PoolerInfo) -> None:
        self._info = info
        # What was given last, as it was then, and what it gave.
        self._last: tuple[tuple[object, ...], Pooling] | None = None

    def resolve(self, params: PoolingParams) -> Pooling:
        """Return what `resolve` does; equal parameters in a row give the same object.

        Raises:
            ParamsError: as `resolve`.
        """
        given, last = snapshot(params), self._last
        if given is not None and last is not None and last[0] == given:
            return last[1]
        made = resolve(params, self._info)
        if given is not None:
            self._last = (given, made)
        return made


def _task(params: PoolingParams, info: PoolerInfo) -> str:
    task = params.task or info.usual
    if task not in info.tasks:
        instead = " or ".join(f"{_CALLS[known]} (task {known!r})" for known in info.tasks)
        kind, gives = "Embedding" if "embed" in task else "Classification", "scores" if info.scores else "vectors"
        raise ParamsError(
            # Clients of vLLM look for the words before the colons.
            f"Unsupported task: {task!r}. {kind} API is not supported by this model: it gives {gives}.",
            f"Use {instead}.",
            param="task",
        )
    return task


def _dimensions(params: PoolingParams, info: PoolerInfo, task: str) -> int | None:
    wanted = params.dimensions
    if wanted is None:
        return info.dimensions if task in ("embed", "token_embed") else None
    if info.scores:
        raise ParamsError("dimensions have no meaning for scores.", "Leave it out.", param="dimensions")
    if wanted > info.width:
        raise ParamsError(
            f"dimensions={wanted}, but the model gives vectors of {info.width} numbers.",
            f"Give at most {info.width}.",
            param="dimensions",
        )
    if reason := info.why_not_truncated(wanted):
        engine = "start with hf_overrides={'is_matryoshka': True} if the model was trained for that"
        remedy = "Give one of these." if info.matryoshka else "Leave dimensions out."
        raise ParamsError(reason, remedy, param="dimensions", or_engine="" if info.matryoshka else engine)
    return wanted


def _returned(params: PoolingParams, info: PoolerInfo, task: str) -> tuple[int, ...]:
    if params.returned_token_ids is None:
        return info.returned_ids
    if not info.scores:
        raise ParamsError("returned_token_ids need a model with classes.", "Leave it out.", param="returned_token_ids")
    wrong = [number for number in params.returned_token_ids if number >= info.width]
    if wrong:
        raise ParamsError(
            f"returned_token_ids contains {wrong[0]}; there are {info.width} classes.", param="returned_token_ids"
        )
    return tuple(params.returned_token_ids)
