"""Compiles one layer of a stack; the other layers have the same shape and reuse it."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import Context
from typing import Any

import torch
from torch import Tensor, nn

from beheld.core.errors import first_line
from beheld.models.surgery.operation import Changes, Target
from beheld.platform.triton import HAS_TRITON
from beheld.utils.gc_tuning import count_as_old
from beheld.utils.log import get_logger

logger = get_logger(__name__)

# torch.compile stops at eight forms of a function by default. Gemma 3n's layers are of eight kinds (with a window or
# without, sparse or not, writing a shared cache or reading it), each compiled for one token and for more.
_MAX_KINDS = 64


class _Settings:
    """The compiler settings that compiled layers need while passes run.

    Newer versions of torch keep settings for each thread, older ones for the process: there the first of several
    overlapping passes makes them, and the last one takes them back.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._per_thread: bool | None = None
        self._passes = 0
        self._patch: Any = None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Apply the settings within the block, which is a pass; blocks of several threads may overlap."""
        import torch._dynamo

        config: Any = torch._dynamo.config
        # Numbers like attention's scale would first be traced as inputs, and then be traced again as constants.
        made = config.patch(recompile_limit=max(config.recompile_limit, _MAX_KINDS), specialize_float=True)
        with self._lock:
            if self._per_thread is None:
                self._per_thread = _settings_are_per_thread(config)
        if self._per_thread:
            with made:
                yield
            return
        with self._lock:
            self._passes += 1
            if self._passes == 1:
                self._patch = made
                self._patch.__enter__()
        try:
            yield
        finally:
            with self._lock:
                self._passes -= 1
                if not self._passes:
                    self._patch.__exit__(None, None, None)


def _settings_are_per_thread(config: Any) -> bool:
    """Return whether torch keeps these settings for each thread, so that no other thread sees a change."""
    limit = config.recompile_limit + 1
    with config.patch(recompile_limit=limit):
        return bool(Context().run(lambda: config.recompile_limit) != limit)


settings = _Settings()


def compile_within(target: Target, changes: Changes) -> None:
    """Let passes run with these settings."""
    target.around.append(settings)
    changes.undo_with(target.around.pop)


def compile_layers(
    layers: Sequence[Any],
    changes: Changes,
    *,
    for_many: bool = True,
    level: int = logging.WARNING,
    one_row: Mapping[nn.Module, Callable[..., Any]] | None = None,
) -> None:
    """Compile one layer of a stack; the others, having the same shape, reuse it.

    A layer that the compiler refuses runs uncompiled, and this is logged once. Passes must run within `settings`.

    Args:
        for_many: False: only for passes of a single row.
        level: the log level of that message.
        one_row: computes a single row of some layers, which are then not compiled for single rows.
    """
    _keep_kernels_in_one_place()
    # The compiler collects young garbage each time. All imported objects would be young, and take it 0.3 s.
    count_as_old()
    refused: list[str] = []

    @functools.cache
    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        # Once for all layers of a class: each call takes 4 ms (under a profiler), whatever it returns.
        return _quietly(torch.compile(function, dynamic=True, fullgraph=True, options=_ROUNDED))

    for layer in layers:
        plain = layer.forward
        own = inspect.ismethod(plain) and plain.__self__ is layer
        call = functools.partial(compiled(plain.__func__), layer) if own else compiled(plain)
        one = (one_row or {}).get(layer, call)
        forward = _compiled(layer, call if for_many else plain, one, refused, level, changes)
        changes.set(layer, "forward", forward)


def _quietly(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Make the first call without the compiler's warning about exact float32 products."""
    first = [True]

    @functools.wraps(compiled)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not first:
            return compiled(*args, **kwargs)
        first.clear()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")
            return compiled(*args, **kwargs)

    return call


# A compiler that fuses operations keeps intermediates in float32. In 16 bits, answers would then diverge from the
# model's sooner than other kernels cause: every operation's result is rounded as if it ran alone.
_ROUNDED: dict[str, Any] = {"emulate_precision_casts": True}


def _compiled(
    layer: nn.Module,
    many: Callable[..., Any],
    one: Callable[..., Any],
    refused: list[str],
    level: int,
    changes: Changes,
) -> Callable[..., Any]:
    """Return a layer's forward that is compiled until the compiler refuses a layer of the stack, recorded in `refused`.

    A single row uses `one`, others `many`. The function stays in place when the compiler refuses, because other
    operations may have wrapped it by then (last_layer.py).
    """
    plain = layer.forward
    hooked = [layer]

    def forward(*args: Any, **kwargs: Any) -> Any:
        if refused:
            return plain(*args, **kwargs)
        if hooked:
            _forget_recorders(hooked.pop(), changes)
        x = args[0] if args else kwargs.get("hidden_states")
        call = one if isinstance(x, Tensor) and x.numel() == x.shape[-1] else many
        try:
            return call(*args, **kwargs)
        except torch._dynamo.exc.TorchDynamoException as error:
            refused.append(type(layer).__name__)
            logger.log(level, "%s could not be compiled and runs as it is: %s", refused[0], first_line(error))
            return plain(*args, **kwargs)

    forward.plain = plain  # type: ignore[attr-defined]
    return forward


_RECORDERS = "transformers.utils.output_capturing"


def _forget_recorders(layer: nn.Module, changes: Changes) -> None:
    """Remove the hooks by which transformers records the outputs of a layer's parts: the compiler cannot trace them.

    A model that reads hidden states of its tower (LLaVA) installs them everywhere in its first pass. The layer's own
    hooks stay, because they are called outside compiled code; outputs of its parts are not read.
    """
    for part in layer.modules():
        hooks = part._forward_hooks
        for key in [k for k, hook in hooks.items() if getattr(hook, "__module__", "") == _RECORDERS]:
            if part is not layer:
                changes.undo_with(functools.partial(hooks.__setitem__, key, hooks.pop(key)))


def _keep_kernels_in_one_place() -> None:
    """Name Triton's own folder of compiled kernels, unless the user names one.

    Otherwise torch's compiler names another folder when it first compiles, and not when it finds what it compiled. So
    the kernels that a first start compiled are not found by the second, which takes ten seconds longer.
    """
    if HAS_TRITON:
        from triton import knobs

        os.environ.setdefault("TRITON_CACHE_DIR", knobs.cache.dir)
