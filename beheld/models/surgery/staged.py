"""Makes a model of a pipeline's stage: other stages' layers are empty, and hidden states enter and leave between.

What a model does before its layers, it does in every stage; only the first stage's result is used. Likewise for what
comes after them, in the last stage.

Shapes: T tokens of a step, H hidden size.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from beheld.core.config import ModelInfo
from beheld.core.errors import ConfigError
from beheld.models.surgery.operation import Changes
from beheld.models.surgery.parts import text_model, text_part
from beheld.parallel.stages import StagePlan, split
from beheld.utils.named_as import named_as


class AbsentPartError(AttributeError):
    """A model reads a part of a layer that another stage holds."""


class Absent(nn.Module):
    """Takes the place of another stage's layer: it passes hidden states on."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        own = {"training", "forward"} | set(vars(self))
        # Models choose masks and positions by what a layer says of itself.
        for name, value in vars(layer).items():
            if name not in own and not name.startswith("_") and isinstance(value, bool | int | float | str | None):
                setattr(self, name, value)
        self.__dict__["gives_tuple"] = _gives_tuple(type(layer))  # type: ignore[arg-type]
        self.__dict__["take"] = None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            raise AbsentPartError(f"it reads `{name}` of every layer") from error

    def forward(self, hidden_states: Tensor, *args: Any, **keywords: Any) -> Any:
        """Return the same hidden states, as the layer would."""
        if self.__dict__["take"] is not None:
            self.__dict__["take"](hidden_states)
        return (hidden_states, None) if self.__dict__["gives_tuple"] else hidden_states


@functools.cache
def _gives_tuple(kind: Any) -> bool:
    """Return whether a layer's forward returns its hidden states as the first of several."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind.forward)))
    tuples = {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    returned = [node.value for node in ast.walk(tree) if isinstance(node, ast.Return)]
    return any(isinstance(v, ast.Tuple) or (isinstance(v, ast.Name) and v.id in tuples) for v in returned)


def staged(model_class: Any, plan: StagePlan) -> Any:
    """Return a subclass of `model_class` whose models hold one stage."""

    class Staged(model_class):
        def __init__(self, config: Any, *args: Any, **keywords: Any) -> None:
            super().__init__(config, *args, **keywords)
            empty_others(self, plan)

    return named_as(Staged, model_class)


def bounds_of(model: Any, info: ModelInfo, stages: int) -> tuple[int, ...]:
    """Return the bounds of stages, of a whole model, which may be on the meta device; see StagePlan.

    Raises:
        ConfigError: it cannot be cut into so many.
    """
    layers = _layers_of(model)
    reason = _uncut(layers, info)
    if reason is not None:
        raise ConfigError(
            f"{type(model).__name__} cannot be cut into stages: {reason}.",
            "Give pipeline_parallel_size=1.",
            param="pipeline_parallel_size",
        )
    sizes = [_bytes(layer) for layer in layers]
    head = model.get_output_embeddings()
    last = 0 if head is None else _bytes(head)
    return split(sizes, max(0, _bytes(model) - sum(sizes) - last), last, info, stages)


def empty_others(model: Any, plan: StagePlan) -> None:
    """Take the layers of other stages from a model, and from what it says of ranks' parts."""
    layers = _layers_of(model)
    for number, layer in enumerate(layers):
        if number not in plan.layers:
            layers[number] = Absent(layer)
    shards = getattr(model, "shard_plan", None)
    if shards is not None:
        model.shard_plan = shards.keeping({name for name, _ in model.named_modules()}.__contains__)


def _layers_of(model: Any) -> Any:
    """Return the list of decoder layers, also of a model whose family has yet to name it as others do.

    Raises:
        ModelError: it has none.
    """
    decoder = text_part(model)
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    lists = [each for each in decoder.children() if isinstance(each, nn.ModuleList) and len(each) == count]
    return lists[0] if len(lists) == 1 else text_model(model).layers


def _uncut(layers: Any, info: ModelInfo) -> str | None:
    """Return why no stage can hold some of the layers alone; None if one can."""
    if any(layer >= len(layers) for group in info.kv_groups for layer in group.layers):
        return "its layers keep more than one state or cache each"
    seen = set[int]()
    for layer in layers:
        own = {id(parameter) for parameter in layer.parameters()}
        if own & seen:
            return "its layers share weights"
        seen |= own
    return None


def _bytes(module: nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())


class Seams:
    """Where hidden states enter and leave a stage.

    Attributes:
        given: what the first own layer gets in place of what its model gives it; None to leave it.
        made: what the last own layer gave in the last pass.
    """

    def __init__(self, model: Any, plan: StagePlan, changes: Changes) -> None:
        self.given: Tensor | None = None
        self.made: Tensor | None = None
        layers = text_model(model).layers
        if plan.stage > 0:
            entry = layers[plan.layers.start]
            changes.set(entry, "forward", self._entering(entry.forward))
        if plan.layers.stop < len(layers):
            layers[plan.layers.stop].__dict__["take"] = self._take

    def _take(self, hidden_states: Tensor) -> None:
        self.made = hidden_states

    def _entering(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def entering(*args: Any, **keywords: Any) -> Any:
            if self.given is None:
                return forward(*args, **keywords)
            if args:
                return forward(self.given, *args[1:], **keywords)
            return forward(**keywords | {"hidden_states": self.given})

        return entering
