"""Instructions for Triton kernels that start before the kernel before them has ended; see KernelFacts.early_launch.

Importing this imports Triton.
"""

from __future__ import annotations

from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = ["gdc_launch_dependents", "gdc_wait"]
