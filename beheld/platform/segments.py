"""Memory for weights on a GPU: taken in pieces of the weights' sizes, so that what is replaced can be given back.

transformers takes room for all weights in one piece before it reads them, since asking the driver weight by weight, in
between, is slow. From one piece PyTorch gives nothing back to the driver until all of it is free: of the weights that
are joined into others after loading (`models/surgery/joined.py`), half of a model's, the memory would be lost to the
KV cache. transformers asks for nothing where PyTorch already holds enough that is unused. So it is taken here before,
all at once as well, but as one piece for each weight:

    one piece      | q | k | v | o | gate | up | down | ...      q, k, v freed: the piece is still in use
    by weight      | q | k | v | o | gate | up | down | ...      q, k, v freed: three pieces that go back
                   `-- each a piece of the driver's --'

PyTorch puts a tensor where it fits best, and so each weight into a piece of its size. What does not fit, parts of
experts that are joined while they are loaded for one, takes memory as ever.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

# Tensors below 1 MiB share pieces of 2 MiB, those below 10 MiB share pieces of 20 (c10/cuda/CUDACachingAllocator).
_TINY, _SMALL, _SHARED = 1 << 20, 10 << 20, 20 << 20


def take(sizes: Iterable[int], device: str) -> int:
    """Let PyTorch hold unused memory for tensors of these sizes in bytes; returns how much it took for them.

    Raises:
        torch.OutOfMemoryError: there is not so much.
    """
    sizes = [size for size in sizes if size > _TINY]
    pieces = [size for size in sizes if size >= _SMALL]
    pieces += [_SHARED] * -(-sum(size for size in sizes if size < _SMALL) // _SHARED)
    held = [torch.empty(size, dtype=torch.uint8, device=device) for size in pieces]
    held.clear()
    return sum(pieces)
