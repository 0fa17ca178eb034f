"""Parameters of a request that is pooled: PoolingParams is the user's form, Pooling the engine's."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from beheld.core.errors import ParamsError
from beheld.core.value_checks import known_keywords, nearest, sequence, whole

POOLING_TASKS = ("embed", "token_embed", "classify", "token_classify")
"""What a pooling model may give: a vector, a vector for each position, scores of classes, scores at each position."""

# Names of older versions of vLLM.
_TASK_ALIASES = {"encode": "token_embed", "embedding": "embed", "score": "classify", "reward": "token_classify"}
# Names in PoolingParams.extra_kwargs.
PAIR_BOUNDS = ("max_tokens_per_query", "max_tokens_per_doc")


@dataclass(frozen=True)
class Alignment:
    """Which weights of cross-attention say when a prompt's tokens are spoken; see pool/alignment.py.

    Attributes:
        heads: pairs (decoder layer, query head).
        start: the first position whose weights are read.
        num_states: how many of the item's first states were heard; what follows is silence that fills it up.
        width: states of the median filter, an odd number.
    """

    heads: tuple[tuple[int, int], ...]
    start: int
    num_states: int
    width: int = 7


@dataclass(frozen=True)
class Pooling:
    """Resolved pooling parameters of one sequence: nothing is sampled; the prompt gives a vector or scores.

    Attributes:
        task: one of POOLING_TASKS.
        method: which hidden states are pooled: those of the "last" position, of the first ("cls"), the "mean" of all,
            "all" of them, or those of the positions of the token `step_id` ("step").
        activate: scale vectors to length 1; make probabilities of scores.
        dimensions: truncate vectors to this many numbers; None keeps all.
        step_id: see `method`.
        returned_ids: the classes whose scores are given, in this order; empty gives all.
        second: the position where the second text of a pair starts; None for one text.
        alignment: if given, no hidden state is pooled: a model that generates gives the weights (N, E) of the prompt's
            positions from `alignment.start` on.
    """

    task: str = "embed"
    method: str = "last"
    activate: bool = True
    dimensions: int | None = None
    step_id: int | None = None
    returned_ids: tuple[int, ...] = ()
    second: int | None = None
    alignment: Alignment | None = None

    @property
    def reads_all(self) -> bool:
        """True if pooling needs what is computed before the last position; only positions computed now have it."""
        return self.method != "last" or self.alignment is not None


@dataclass
class PoolingParams:
    """What to make of a prompt's hidden states. Names, meaning and defaults follow vLLM's class of the same name.

    None takes the model's default.

    Attributes:
        use_activation: scale vectors to length 1; make probabilities of scores.
        dimensions: truncate vectors to this many numbers, if the model was trained for that.
        task: one of POOLING_TASKS.
        step_tag_id, returned_token_ids: for reward models: the token at whose positions there are scores, and the
            classes that are returned.
        truncate_prompt_tokens: keep this many tokens of a longer text, from its start; -1 means as many as fit.
        normalize: the same as `use_activation`, in older scripts.
        softmax, activation: the same for scores.
        extra_kwargs: PAIR_BOUNDS, for LLM.score: as many tokens of each text of the first or the second side are read.

    Raises:
        ParamsError: a keyword is unknown or a value is wrong; the error names the parameter.
    """

    use_activation: bool | None = None
    dimensions: int | None = None
    task: str | None = None
    step_tag_id: int | None = None
    returned_token_ids: list[int] | None = None
    truncate_prompt_tokens: int | None = None
    normalize: bool | None = None
    softmax: bool | None = None
    activation: bool | None = None
    extra_kwargs: dict[str, Any] | None = None

    def __new__(cls, *_: Any, **options: Any) -> PoolingParams:
        """Refuse an unknown keyword with an error that names it; a dataclass alone would raise a TypeError."""
        known_keywords(cls, options, ParamsError, "pooling parameter")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        self.verify()

    def verify(self) -> None:
        """Check every field. Called again when the request is resolved, because fields may have changed."""
        for name in ("use_activation", "normalize", "softmax", "activation"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, bool):
                raise ParamsError(f"{name} must be True or False, got {value!r}.", param=name)
        self.dimensions = whole("dimensions", self.dimensions, 1, optional=True)
        self.step_tag_id = whole("step_tag_id", self.step_tag_id, 0, optional=True)
        self.truncate_prompt_tokens = whole("truncate_prompt_tokens", self.truncate_prompt_tokens, -1, optional=True)
        if self.truncate_prompt_tokens == 0:
            raise ParamsError("truncate_prompt_tokens must be -1 or at least 1.", param="truncate_prompt_tokens")
        sequence("returned_token_ids", self.returned_token_ids)
        if self.returned_token_ids is not None:
            self.returned_token_ids = [whole("returned_token_ids", each, 0) for each in self.returned_token_ids]
        for name, value in (self.extra_kwargs or {}).items():
            if name not in PAIR_BOUNDS:
                raise ParamsError(f"extra_kwargs: {name!r} has no effect here.", "Leave it out.", param="extra_kwargs")
            whole(name, value, 1)
        if self.task is not None:
            self.task = pooling_task(self.task)

    @property
    def activate(self) -> bool | None:
        """The activation that was asked for, under any of its names; None for the model's default."""
        given = (self.use_activation, self.normalize, self.softmax, self.activation)
        return next((value for value in given if value is not None), None)

    def clone(self) -> PoolingParams:
        """An independent copy."""
        return PoolingParams(**{f.name: getattr(self, f.name) for f in fields(self)})


def pooling_task(name: Any) -> str:
    """The task of that name, which may be one of older versions of vLLM.

    Raises:
        ParamsError: there is none.
    """
    found = _TASK_ALIASES.get(name, name) if isinstance(name, str) else name
    if found == "plugin":
        raise ParamsError(
            "No IOProcessor plugin installed.", "Write the processor as code before the engine.", param="task"
        )
    if found not in POOLING_TASKS:
        raise ParamsError(
            f"There is no pooling task {name!r}.",
            (nearest(name, POOLING_TASKS) if isinstance(name, str) else "") or f"Known: {', '.join(POOLING_TASKS)}.",
            param="task",
        )
    return str(found)
