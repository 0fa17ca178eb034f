"""Compiled functions share PyTorch's own threads."""

from __future__ import annotations

import pytest
import torch

from beheld.platform import jit


def test_threads_are_those_of_pytorch_whatever_else_is_loaded() -> None:
    """Another package's OpenMP has threads of its own, which keep the processors from PyTorch's."""
    pytest.importorskip("sentencepiece")
    library = jit._openmp()
    if library is None:
        pytest.skip("PyTorch has no OpenMP with GNU's names")
    before = torch.get_num_threads()
    try:
        for count in (2, 1, 3):
            torch.set_num_threads(count)
            assert library.omp_get_max_threads() == count
    finally:
        torch.set_num_threads(before)
