"""Of kernels for a single row, those of the compiler's signal first and wait; others stay as they are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from beheld.models import early


def lines_of(options: dict[str, Any]) -> list[Any]:
    """What becomes of a kernel's lines that is compiled with these options."""
    import torch._inductor.config as inductor
    from torch._inductor.codegen.triton import TritonKernel

    kernel: Any = TritonKernel
    code = SimpleNamespace(_lines=["a = 1", kernel.GDC_WAIT, "b = tl.load(a)", kernel.GDC_LAUNCH, "tl.store(b)"])
    with inductor.patch(options):
        kernel._filter_pdl(SimpleNamespace(GDC_WAIT=kernel.GDC_WAIT, GDC_LAUNCH=kernel.GDC_LAUNCH), code)
    return code._lines


def test_only_what_is_compiled_for_it_signals_first() -> None:
    options = early._signal_first()
    if not options:
        pytest.skip("this compiler has no such kernels")
    from torch._inductor.codegen.triton import TritonKernel

    kernel: Any = TritonKernel
    assert lines_of({}) == ["a = 1", kernel.GDC_WAIT, "b = tl.load(a)", kernel.GDC_LAUNCH, "tl.store(b)"]
    assert lines_of(options) == [kernel.GDC_LAUNCH, kernel.GDC_WAIT, "a = 1", "b = tl.load(a)", "tl.store(b)"]


def test_no_options_where_kernels_cannot_start_early() -> None:
    assert early.compile_options(nn.Linear(2, 2)) == {}
    assert early.compile_options(nn.Identity()) == {}
    assert not early.early_start(torch.device("cpu"))


def test_no_options_where_kernels_would_not_all_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the compiler does of itself waits for the kernel before alone; in a chain that is not enough."""
    monkeypatch.setattr(early, "early_start", lambda device: True)
    monkeypatch.setattr(early, "_signal_first", lambda: {"some": "mark"})
    assert early.compile_options(nn.Linear(2, 2)).get("some") == "mark"
    monkeypatch.setattr(early, "_signal_first", dict)
    assert early.compile_options(nn.Linear(2, 2)) == {}


def test_the_mark_is_part_of_what_is_cached() -> None:
    """What was compiled without it must not be taken for what was compiled with it."""
    options = early._signal_first()
    if not options:
        pytest.skip("this compiler has no such kernels")
    import torch._inductor.config as inductor
    from torch._inductor.codecache import FxGraphHashDetails

    graph = torch.fx.symbolic_trace(nn.Identity())
    plain = FxGraphHashDetails(graph, [], {}, [])
    with inductor.patch(options):
        marked = FxGraphHashDetails(graph, [], {}, [])
    assert plain.post_grad_custom_pre_pass != marked.post_grad_custom_pre_pass
