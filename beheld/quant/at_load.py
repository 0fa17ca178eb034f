"""Weights that are rounded as they are loaded: the text model's linear layers and experts, and the head.

Towers, embeddings, norms and routers keep their type. What a weight becomes is up to a Rounding.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from beheld.platform import host
from beheld.quant import file_types
from beheld.quant.linear import StoredExperts, StoredLinear
from beheld.quant.listed_experts import EXPERTS
from beheld.quant.method import Replace, TextOf
from beheld.quant.none import Unquantized
from beheld.utils import allocator
from beheld.utils.log import get_logger

logger = get_logger(__name__)

# Smaller layers decide more than they compute: routers, gates of shared experts.
FEWEST_OUTPUTS = 16
# A layer with more weights is not rounded while other threads round other layers.
_MOST_AT_ONCE = 1 << 24

# The parent of a module, its name there, and the module.
_Found = tuple[nn.Module, str, nn.Module]


class Rounding(Protocol):
    """What weights become.

    Attributes:
        name: the value of the option `quantization`.
        words: what layers are afterwards, for the log.
        at_once: how many layers are best rounded at once.
        takes_head, takes_experts: whether the layer that gives logits, and experts, are rounded.
    """

    name: str
    words: str
    at_once: int
    takes_head: bool
    takes_experts: bool

    def fits(self, outputs: int, inputs: int) -> bool:
        """Return whether layers of this size can be rounded."""

    def group(self, inputs: int) -> int | None:
        """Return how many inputs share a scale; None if all do."""

    def linear(self, linear: nn.Linear, head: bool, alone: bool = True) -> StoredLinear:
        """Round a linear layer.

        Args:
            head: whether it gives logits.
            alone: whether all threads may help; else other layers are rounded meanwhile.

        Raises:
            ModelError: its weights are NaN or infinity.
        """

    def experts(self, experts: Any) -> StoredExperts:
        """Round transformers' experts, which lose their weights."""

    def kept_bytes(self, outputs: int, inputs: int, head: bool) -> int:
        """Return the bytes of a rounded weight (outputs, inputs)."""


class RoundedAtLoad(Unquantized):
    """See QuantMethod: weights are read as unquantized ones, on a CPU mapped into memory, and rounded afterwards.

    Args:
        dtype: of the activations.
        device: where layers are rounded; those in the host's memory are moved there one by one. None: where they are.
    """

    def __init__(self, rounding: Rounding, dtype: torch.dtype, device: str | None = None) -> None:
        self.name = rounding.name
        self._rounding, self._dtype, self._device = rounding, dtype, device

    def kept_as(self, parameter: Tensor, weights: Sequence[Any]) -> str | None:
        """Return what inputs share a scale, if weights of these sizes are rounded.

        Those of an output do on each rank: the part has a scale of its own, which is no greater than the whole's.
        """
        outputs, inputs = parameter.shape[-2:]
        if not self._rounding.fits(outputs, inputs):
            return None
        group = self._rounding.group(inputs)
        return "by output" if group is None else f"in groups of {group}"

    def settle(self, model: Any, model_class: Any, text_of: TextOf, replace: Replace) -> None:
        """Replace layers one by one, so that only few layers' weights are ever held twice."""
        linears = experts = size = 0
        pages = host.FilePages()
        for parent, name, child, made in self._rounded(model, self._covered(model, text_of(model)), pages):
            if isinstance(child, nn.Linear) and made.weight.dtype != self._dtype:
                # The weight had the type of the checkpoint's file; activations have the model's.
                made.weight = made.weight.to(self._dtype)
            linears, experts = linears + isinstance(made, StoredLinear), experts + isinstance(made, StoredExperts)
            size += sum(getattr(module, "packed_bytes", 0) for module in made.modules())
            size += sum(parameter.nbytes for parameter in made.parameters())
            if is_tied(model, child):
                replace(parent, name, made, lambda module: tied_again(model, module))
            else:
                replace(parent, name, made, lambda module: module.restored())  # type: ignore[operator]
            if isinstance(child, nn.Linear) and self._device is None:
                pages.read(child.weight.data_ptr(), child.weight.nbytes)
            # The loop's own reference would keep the old weights during the next layer.
            del child, made
        pages.end()
        allocator.give_back_freed()
        logger.info(
            "quantization=%r: %d linear layers and %d blocks of experts take %.2f GiB. "
            "They are %s. Embeddings and towers keep their type.",
            self.name,
            linears,
            experts,
            size / 2**30,
            self._rounding.words,
        )
        left = [
            f"{path}.{name}"
            for path, module in text_of(model).named_modules()
            for name, parameter in module.named_parameters(recurse=False)
            if parameter.dim() > 2 or (parameter.dim() == 2 and _joins_experts(path, module))
        ]
        if left:
            logger.warning(
                "%d weights of the text model's experts or convolutions are not rounded because of their form, for "
                "example %r: they keep their type.",
                len(left),
                left[0],
            )

    def _rounded(
        self, model: Any, covered: Iterator[_Found], pages: host.FilePages
    ) -> Iterator[tuple[nn.Module, str, nn.Module, Any]]:
        """Yield what is found and what it becomes, in order."""
        head = model.get_output_embeddings()
        if self._rounding.at_once < 2 or self._device is not None:
            for parent, name, child in covered:
                # By now nothing refers to the layer before, so that the device never holds two as they were.
                self._move(child, pages)
                yield parent, name, child, self._whole(child, child is head)
            return
        # Threads that sleep while they wait: on a busy machine OpenMP's would keep the cores from those they wait for.
        with ThreadPoolExecutor(self._rounding.at_once) as pool:
            waiting: deque[tuple[_Found, Future[StoredLinear]]] = deque()
            for found in covered:
                child = found[2]
                few = child if isinstance(child, nn.Linear) and child.weight.numel() <= _MOST_AT_ONCE else None
                while len(waiting) > (self._rounding.at_once if few is not None else 0):
                    done, future = waiting.popleft()
                    yield (*done, future.result())
                if few is not None:
                    waiting.append((found, pool.submit(self._rounding.linear, few, few is head, alone=False)))
                else:
                    yield (*found, self._whole(child, child is head))
                # Names of this loop would keep old weights.
                del found, child, few
            while waiting:
                done, future = waiting.popleft()
                yield (*done, future.result())

    def _move(self, module: nn.Module, pages: host.FilePages) -> None:
        """Move a layer to the device where it is rounded, in the model's type; what is there already stays."""
        if self._device is None:
            return
        file_types.cast(module, self._dtype)
        read = [(parameter.data_ptr(), parameter.nbytes) for parameter in module.parameters()]
        module.to(self._device)
        for each in read:
            pages.read(*each)

    def _whole(self, module: Any, head: bool) -> Any:
        return self._rounding.linear(module, head) if isinstance(module, nn.Linear) else self._rounding.experts(module)

    def stored_bytes(
        self, path: Path, model: Any, text_of: TextOf, weights: Mapping[str, Any] | None = None
    ) -> int | None:
        """Return the bytes of a model on the meta device whose layers are rounded."""
        total = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
        for _, _, child in self._covered(model, text_of(model)):
            head = child is model.get_output_embeddings()
            for weight in child.parameters():
                if weight.dim() > 1:
                    outputs, inputs = math.prod(weight.shape[:-1]), weight.shape[-1]
                    if getattr(child, "is_transposed", False):
                        outputs, inputs = math.prod(weight.shape) // weight.shape[-2], weight.shape[-2]
                    total += self._rounding.kept_bytes(outputs, inputs, head)
                    total -= 0 if is_tied(model, child) else weight.numel() * weight.element_size()
        return total

    def _covered(self, model: Any, text: nn.Module) -> Iterator[_Found]:
        """List what is rounded, lazily, so that replaced layers are let go: parent, name and module."""
        routers: set[nn.Module] = set()
        for module in text.modules():
            routes = any("experts" in name for name, _ in module.named_children())
            for name in [name for name, _ in module.named_children()]:
                if module in routers or (routes and name in ("gate", "router")):
                    # Some hold the layer that decides, in place of being it.
                    routers.add(module.get_submodule(name))
                elif self._takes(module.get_submodule(name)):
                    yield module, name, module.get_submodule(name)
        head = model.get_output_embeddings()
        inside = any(module is head for module in text.modules())
        if not inside and self._rounding.takes_head and self._takes(head):
            yield (*parent_of(model, head), head)

    def _takes(self, module: Any) -> bool:
        if type(module) is nn.Linear:
            whole = file_types.has_type(module, self._dtype) and module.weight.numel()
            fits = whole and self._rounding.fits(module.out_features, module.in_features)
            return bool(fits and module.out_features >= FEWEST_OUTPUTS)
        return self._rounding.takes_experts and self._are_experts(module)

    def _are_experts(self, module: Any) -> bool:
        """Return whether a module declares gated experts without biases and norms."""
        if not getattr(module, "has_gate", False) or getattr(module, "has_bias", True):
            return False
        if getattr(module, "has_post_expert_norm", False) or not hasattr(module, "is_transposed"):
            return False
        weights = [getattr(module, name, None) for name in EXPERTS]
        whole = [isinstance(w, Tensor) and w.dim() == 3 and w.dtype == self._dtype and bool(w.numel()) for w in weights]
        if not all(whole) or not hasattr(module, "_apply_gate"):
            return False
        shapes = [weight.shape[1:] for weight in weights if weight is not None]
        sizes = [tuple(reversed(shape)) if module.is_transposed else tuple(shape) for shape in shapes]
        return all(self._rounding.fits(outputs, inputs) for outputs, inputs in sizes)


def _joins_experts(path: str, module: nn.Module) -> bool:
    """Return whether a module's matrices are those of several experts, one after the other."""
    return "experts" in path.split(".") and not isinstance(module, (nn.Linear, StoredLinear, StoredExperts))


def parent_of(model: nn.Module, module: nn.Module) -> tuple[nn.Module, str]:
    """Return the parent of a module, and the module's name in it."""
    path = next(name for name, each in model.named_modules() if each is module)
    return model.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2]


def is_tied(model: Any, module: nn.Module) -> bool:
    """Return whether this is a head that shares the embeddings' weights."""
    return module is model.get_output_embeddings() and module.weight is model.get_input_embeddings().weight


def tied_again(model: Any, module: Any) -> nn.Module:
    """Return the head that a rounded head replaced, which shares the embeddings' weights."""
    linear: nn.Module = module.restored()
    linear.weight = model.get_input_embeddings().weight
    return linear
