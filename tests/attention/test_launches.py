"""What every launch of a kernel must say."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

HOUSE = Path(__file__).parents[2] / "beheld"


def launches() -> list[tuple[str, ast.Call]]:
    """(kernel, call) of every launch in the house: a call of `kernel[grid]`, for functions made by triton.jit."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in sorted(HOUSE.rglob("*.py"))]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    kernels = {
        node.name
        for node in nodes
        if isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(d) for d in node.decorator_list)
    }
    return [
        (node.func.value.id, node)
        for node in nodes
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Subscript)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id in kernels
    ]


def test_every_launch_settles_whether_products_and_sums_are_fused() -> None:
    """Triton 3.9 warns of launches that do not, and Triton 3.10 computes other last bits for them."""
    found = launches()
    assert {kernel for kernel, _ in found} >= {
        "_plan",
        "_decode",
        "_prefill",
        "_store",
        "_tower",
        "_cross",
        "_long_rows",
    }
    for kernel, call in found:
        assert "enable_fp_fusion" in [keyword.arg for keyword in call.keywords], kernel


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_a_settled_launch_is_compiled_without_a_warning(capability: int) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend

    options = make_backend(GPUTarget("cuda", capability, 32)).parse_options({"enable_fp_fusion": True})
    assert options.enable_fp_fusion
