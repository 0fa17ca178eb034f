"""How a model pools: PoolerConfig is the user's form of it, PoolerInfo what the engine knows of a pooling model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from beheld.core.errors import ConfigError, ParamsError
from beheld.core.pooling_params import pooling_task
from beheld.core.value_checks import known_keywords, nearest

# The most tokens of a text that is read in parts, unless max_embed_len says so.
LONGEST = 1 << 17
SEQUENCE_METHODS = ("last", "cls", "mean")
TOKEN_METHODS = ("all", "step")


@dataclass(frozen=True)
class DenseLayer:
    """A linear layer after pooling, as sentence-transformers stores it.

    Attributes:
        folder: where its weights lie in the checkpoint.
        width_in, width_out: its sizes.
        bias: whether it has one.
        activation: the class in torch.nn that follows it.
    """

    folder: str
    width_in: int
    width_out: int
    bias: bool
    activation: str


@dataclass(frozen=True)
class PoolerInfo:
    """How a pooling model makes vectors or scores of hidden states.

    Attributes:
        task: its own: one of POOLING_TASKS.
        chosen: the task that the user chose for requests that name none; None for its own.
        method: which hidden states are pooled for one vector or one set of scores; see Pooling.
        token_method: the same for the tasks of each position: "all" or "step".
        activate: whether vectors are scaled to length 1, and scores made probabilities, unless a request decides.
        activation: what makes probabilities of scores: "softmax", "sigmoid" or "identity".
        width: numbers in a vector; number of classes.
        scores: where the classes' weights are: "" if it has no classes, "head" for the checkpoint's own head, and
            "tokens" for rows of the generating head.
        token_ids: the tokens whose rows these are.
        difference: whether the one score is the difference of the two tokens' logits, as (false, true).
        dense: layers after pooling.
        dimensions: numbers that are kept of a vector unless a request decides; None for all.
        matryoshka: whether shorter vectors are still good ones.
        matryoshka_dimensions: the sizes for which that is so; empty for all.
        labels: the classes' names.
        step_id, returned_ids: see Pooling.
        logit_mean, logit_sigma: subtracted from scores, and what they are divided by, before the activation.
        lowercase: whether text is in lower case before it is tokenized.
        late: whether it gives a vector for each position only, and pairs are scored by late interaction: each vector of
            the first side with the nearest of the second.
        whole: whether there is a vector of a whole prompt only, and none of each position.
        filled_to: how many tokens a text is filled up to, with those that its tokenizer fills batches with; None for as
            many as it has.
        last_id: the token that every prompt ends with, at which a model of scores was trained to give them; None for
            none.
        pair_template: the file of the chat template that makes the prompt of a pair unless the user names one; "" for
            none.
        longest: the most tokens of a text that is read in parts where it has more than the model reads, and that gets
            the mean of their vectors; None if such a text is refused.
        encodes: whether the model is an encoder: its attention is both ways, and nothing is kept of a prompt.
    """

    task: str = "embed"
    chosen: str | None = None
    method: str = "last"
    token_method: str = "all"
    activate: bool = True
    activation: str = "softmax"
    width: int = 0
    scores: str = ""
    token_ids: tuple[int, ...] = ()
    difference: bool = False
    dense: tuple[DenseLayer, ...] = ()
    dimensions: int | None = None
    matryoshka: bool = False
    matryoshka_dimensions: tuple[int, ...] = ()
    labels: tuple[str, ...] = ()
    step_id: int | None = None
    returned_ids: tuple[int, ...] = ()
    logit_mean: float = 0.0
    logit_sigma: float = 1.0
    lowercase: bool = False
    late: bool = False
    whole: bool = False
    filled_to: int | None = None
    last_id: int | None = None
    pair_template: str = ""
    longest: int | None = None
    encodes: bool = False

    @property
    def usual(self) -> str:
        """The task of requests that name none."""
        return self.chosen or self.task

    @property
    def tasks(self) -> tuple[str, ...]:
        """What a request may ask for."""
        if not self.scores:
            return ("token_embed",) if self.late else ("embed",) if self.whole else ("embed", "token_embed")
        return ("classify", "token_classify") if self.task == "classify" else ("token_classify",)

    def why_not_truncated(self, dimensions: int) -> str:
        """Return why vectors may not be truncated to so many of their numbers, as a sentence; "" if they may."""
        if dimensions == self.width:
            return ""
        if not self.matryoshka:
            return "The checkpoint does not say that its vectors may be truncated, which makes most models' useless."
        if self.matryoshka_dimensions and dimensions not in self.matryoshka_dimensions:
            known = ", ".join(map(str, self.matryoshka_dimensions))
            return f"dimensions={dimensions} is not one of this model's, which are {known}."
        return ""


@dataclass
class PoolerConfig:
    """The user's choices for a pooling model. Names and meaning follow vLLM's class of the same name.

    None takes the checkpoint's own.

    Raises:
        ConfigError: a keyword is unknown, or a value is wrong or not available.
    """

    pooling_type: str | None = None
    seq_pooling_type: str | None = None
    tok_pooling_type: str | None = None
    use_activation: bool | None = None
    normalize: bool | None = None
    softmax: bool | None = None
    activation: bool | None = None
    dimensions: int | None = None
    step_tag_id: int | None = None
    returned_token_ids: list[int] | None = None
    logit_mean: float | None = None
    logit_sigma: float | None = None
    logit_bias: float | None = None
    task: str | None = None
    enable_chunked_processing: bool = False
    max_embed_len: int | None = None
    enable_flash_late_interaction: bool = True

    def __new__(cls, *_: Any, **options: Any) -> PoolerConfig:
        """Refuse an unknown keyword with an error that names it; a dataclass alone would raise a TypeError."""
        known_keywords(cls, options, ConfigError, "entry of override_pooler_config")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        name = "override_pooler_config"
        if not isinstance(self.enable_chunked_processing, bool):
            raise ConfigError(f"{name}: enable_chunked_processing must be True or False.", param=name)
        if self.max_embed_len is not None and not self.enable_chunked_processing:
            raise ConfigError(
                f"{name}: max_embed_len needs enable_chunked_processing.",
                "Set it to True, or leave both out.",
                param=name,
            )
        for entry in ("use_activation", "normalize", "softmax", "activation"):
            value = getattr(self, entry)
            if value is not None and not isinstance(value, bool):
                raise ConfigError(f"{name}: {entry} must be True or False, got {value!r}.", param=name)
        for entry in ("logit_mean", "logit_sigma", "logit_bias"):
            value = getattr(self, entry)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
                raise ConfigError(f"{name}: {entry} must be a number, got {value!r}.", param=name)
        if self.logit_sigma == 0:
            raise ConfigError(f"{name}: logit_sigma must not be 0.", param=name)
        for entry, low in (("dimensions", 1), ("step_tag_id", 0), ("max_embed_len", 1)):
            value = getattr(self, entry)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < low):
                raise ConfigError(f"{name}: {entry} must be a whole number from {low}, got {value!r}.", param=name)
        if self.task is not None:
            try:
                self.task = pooling_task(self.task)
            except ParamsError as error:
                raise ConfigError(f"{name}: {error.reason}", error.remedy, param=name) from error
        self.seq_pooling_type = self._method("seq_pooling_type", SEQUENCE_METHODS)
        self.tok_pooling_type = self._method("tok_pooling_type", TOKEN_METHODS)
        given = self._method("pooling_type", (*SEQUENCE_METHODS, *TOKEN_METHODS))
        if given in SEQUENCE_METHODS:
            self.seq_pooling_type = self.seq_pooling_type or given
        elif given is not None:
            self.tok_pooling_type = self.tok_pooling_type or given

    def _method(self, entry: str, known: tuple[str, ...]) -> str | None:
        value = getattr(self, entry)
        if value is None:
            return None
        found = value.lower() if isinstance(value, str) else value
        if found not in known:
            names = ", ".join(repr(name.upper()) for name in known)
            raise ConfigError(
                f"override_pooler_config: there is no {entry} {value!r}.",
                f"Known: {names}.",
                param="override_pooler_config",
            )
        return str(found)

    @property
    def activate(self) -> bool | None:
        """The activation that was asked for, under any of its names."""
        given = (self.use_activation, self.normalize, self.softmax, self.activation)
        return next((value for value in given if value is not None), None)

    @classmethod
    def of(cls, given: Any) -> PoolerConfig:
        """The user's choices, from a mapping, an object with the same attributes, or None.

        Raises:
            ConfigError: it is none of these, or an entry is wrong.
        """
        if given is None:
            return cls()
        if isinstance(given, cls):
            return given
        if isinstance(given, Mapping):
            return cls(**given)
        known = [f.name for f in fields(cls)]
        found = {name: getattr(given, name) for name in known if hasattr(given, name)}
        if not found:
            raise ConfigError(
                f"override_pooler_config must be a mapping or a PoolerConfig, got {given!r}.",
                "Write override_pooler_config={'pooling_type': 'MEAN', 'normalize': True}.",
                param="override_pooler_config",
            )
        return cls(**found)


RUNNERS = ("auto", "generate", "pooling")
CONVERSIONS = ("auto", "none", "embed", "classify", "reward")
# The option `task` of older versions -> (runner, convert).
TASKS = {
    "auto": ("auto", "auto"),
    "generate": ("generate", "none"),
    "embed": ("pooling", "embed"),
    "embedding": ("pooling", "embed"),
    "classify": ("pooling", "classify"),
    "score": ("pooling", "classify"),
    "reward": ("pooling", "reward"),
}


def runner_and_convert(task: str, runner: str, convert: str) -> tuple[str, str]:
    """The options `runner` and `convert`, completed by the older option `task`.

    Raises:
        ConfigError: one is unknown, or they contradict each other.
    """
    for name, value, known in (("task", task, TASKS), ("runner", runner, RUNNERS), ("convert", convert, CONVERSIONS)):
        if value not in known:
            remedy = nearest(str(value), known) or f"Known: {', '.join(known)}."
            raise ConfigError(f"There is no {name} {value!r}.", remedy, param=name)
    by_task = TASKS[task]
    for name, value, other in (("runner", runner, by_task[0]), ("convert", convert, by_task[1])):
        if task != "auto" and value not in ("auto", other):
            raise ConfigError(
                f"task={task!r} and {name}={value!r} contradict each other.", "Leave out task.", param=name
            )
    chosen = runner if runner != "auto" else by_task[0], convert if convert != "auto" else by_task[1]
    if chosen[1] in ("embed", "classify", "reward"):
        if chosen[0] == "generate":
            raise ConfigError(
                f"convert={chosen[1]!r} makes a pooling model, which does not generate.",
                "Leave out convert, or set runner='pooling'.",
                param="convert",
            )
        return "pooling", chosen[1]
    return chosen
