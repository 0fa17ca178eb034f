"""Kernels of a single row that start before the one before them has ended ("programmatic dependent launch").

A kernel lets the next one start by a signal, and waits for the end of the one before it by another instruction. Here
each gives the signal first of all and then waits, but for weights, which nobody writes:

    product      signal  read weights  wait  compute
    norm, sums   signal  wait  read  compute                  so their successor reads weights meanwhile

A kernel that waits has waited for all before it, since each of these has done so too: a kernel that did not would take
that from those behind it. What is read before the wait is older than a kernel that did not start early (a library's, or
the first of a graph): a signal does not say that those before have ended.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
from torch import nn

from beheld.platform.registry import platform_of


@functools.cache
def early_start(device: torch.device) -> bool:
    """True if a kernel may start there before the one before it has ended (Hopper and later)."""
    return platform_of(device).kernel_facts(device).early_launch


def compile_options(module: nn.Module) -> dict[str, Any]:
    """The compiler's options for a pass of a single row through `module`.

    With many rows a kernel that waits takes room from the one it waits for: an addition of 8192 rows took 42
    microseconds instead of 31.
    """
    import torch._inductor.config as inductor

    weight = next(itertools.chain(module.parameters(), module.buffers()), None)
    if weight is None or not hasattr(inductor.triton, "enable_pdl") or not early_start(weight.device):
        return {}
    signal_first = _signal_first()
    # Of themselves its kernels wait for the one before them alone, and not all do: those behind would read too early.
    return {"triton.enable_pdl": True, **signal_first} if signal_first else {}


@functools.cache
def _signal_first() -> dict[str, Any]:
    """Let kernels that the compiler writes signal first of all, and all of them wait; returns options that ask for it.

    Of itself it signals behind a kernel's last load, and the next product begins to read its weights only then. There
    is no seam for that, so its last look at a kernel's lines is wrapped; what is compiled without these options stays
    as it is, and a compiler that has no such function is left alone.
    """
    import torch._inductor.config as inductor
    from torch._inductor.codegen.triton import TritonKernel
    from torch._inductor.custom_graph_pass import CustomGraphPass

    kernel: Any = TritonKernel
    if not all(hasattr(kernel, name) for name in ("_filter_pdl", "GDC_WAIT", "GDC_LAUNCH")):
        return {}

    class Mark(CustomGraphPass):  # type: ignore[misc, unused-ignore]
        """Changes nothing, but is part of the key under which the compiler keeps what it has compiled."""

        def __call__(self, graph: Any) -> None:
            pass

        def uuid(self) -> str:
            return "beheld: kernels signal first"

    plain, signal, wait = kernel._filter_pdl, kernel.GDC_LAUNCH, kernel.GDC_WAIT

    def signal_first(self: Any, code: Any) -> None:
        plain(self, code)
        if isinstance(inductor.post_grad_custom_pre_pass, Mark):
            others = [line for line in code._lines if type(line) is not str or line.strip() not in (signal, wait)]
            code._lines = [signal, wait, *others]

    kernel._filter_pdl = signal_first
    return {"post_grad_custom_pre_pass": Mark()}
