"""How fast GPUs are expected to be that share a model: bytes, products and sums, with speeds that were measured.

    next token    a part that is always there + bytes / speed of the memory + sums x time of one
    prefill       products / speed of the matrix units + bytes over the links / speed of the links

The speeds are those of bfloat16 weights on GPUs of one host; docs/explanation/several-gpus.md has them, and the errors.
"""

from __future__ import annotations

from dataclasses import dataclass

# What of a step of one token is left beyond weights and sums: it was calibrated with the speeds of the H100.
_ALWAYS_S = 0.32e-3
# A sum over GPUs in a step, with all that comes with it.
_SUM_S = 12e-6
# What matrix units did in prefill, operations a second, and each direction of a GPU's links, bytes a second.
_PRODUCTS = 0.625e15
_LINKS = 215e9
_GIB = 1 << 30


@dataclass(frozen=True)
class KnownGPU:
    """A kind of GPU whose speeds were measured.

    Attributes:
        name: as users write it.
        memory_bytes: about.
        read: bytes a second that a step of one token reads.
    """

    name: str
    memory_bytes: int
    read: float


GPUS = (KnownGPU("H100", 80 * _GIB, 2.96e12), KnownGPU("H200", 141 * _GIB, 3.98e12))
"""Those that figures calibrate."""
_NEAR = 0.03


@dataclass(frozen=True)
class Expected:
    """What one engine is expected to do.

    Attributes:
        gpu: the kind of GPU whose speeds are taken.
        next_token_s: seconds for each next token of one request.
        prefill_tokens: tokens of short prompts in a second.
    """

    gpu: str
    next_token_s: float
    prefill_tokens: float


def known(memory_bytes: int) -> KnownGPU | None:
    """Return the kind of GPU with so much memory, if its speeds were measured."""
    return next((gpu for gpu in GPUS if abs(memory_bytes / gpu.memory_bytes - 1) < _NEAR), None)


def expected(gpu: KnownGPU, read_bytes: int, products: int, num_sums: int = 0, link_bytes: int = 0) -> Expected:
    """Return what GPUs that share a model, or one that has it whole, are expected to do.

    Args:
        read_bytes, products: of one of the GPUs, see TokenCost.
        num_sums: over the GPUs in a step.
        link_bytes: that each of them sends for a token of a prompt.
    """
    step = _ALWAYS_S + read_bytes / gpu.read + num_sums * _SUM_S
    return Expected(gpu.name, step, 1 / (2 * products / _PRODUCTS + link_bytes / _LINKS))
