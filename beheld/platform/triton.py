"""Whether Triton is installed; it comes with PyTorch for GPUs, and importing it takes a second."""

from __future__ import annotations

import importlib.util

HAS_TRITON = importlib.util.find_spec("triton") is not None
