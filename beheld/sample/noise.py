"""Counter-based noise: a pure function of (seed, position, vocabulary index), independent of the rest of the batch.

Shapes: B rows of a batch, N vocabulary indices.

(seed, position) is mixed into a 64-bit key with the finaliser of SplitMix64 (Steele, Lea and Flood, "Fast splittable
pseudorandom number generators", OOPSLA 2014), on the host, where both are known. Key and vocabulary index are mixed on
the device with the 32-bit hash "lowbias32" of Chris Wellons ("Prospecting for hash functions", 2018), whose two
multiplications are kept apart by the second half of the key. All of it is wrap-around integer arithmetic, so it is the
same on every device; only the final logarithm may differ in its last bit between a CPU and a GPU.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_LOW_64 = (1 << 64) - 1
# Uniforms have 31 bits. Their resolution is finest near 0, where the winners of a large vocabulary come from.
_STEP = 2.0**-31
_BELOW_ONE = 1.0 - 2.0**-24


def mix_seed(seed: int) -> int:
    """64 well mixed bits of a seed of any sign and size: neighbouring seeds give unrelated bits."""
    return int(_splitmix(np.array([(seed + _GOLDEN) & _LOW_64], dtype=np.uint64))[0])


def keys(mixed_B: NDArray[np.uint64], positions_B: NDArray[np.uint64]) -> NDArray[np.int32]:
    """The keys of (mixed seed, position), int32 (B, 2)."""
    return _splitmix(mixed_B + positions_B * np.uint64(_GOLDEN)).view(np.int32).reshape(-1, 2)


def _splitmix(x_B: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x_B = (x_B ^ (x_B >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x_B = (x_B ^ (x_B >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x_B ^ (x_B >> np.uint64(31))


def _fold(x: Tensor, shift: int) -> Tensor:
    """In place x ^= x >> shift, with zeros shifted in: torch shifts signed integers arithmetically."""
    return x.bitwise_xor_((x >> shift).bitwise_and_((1 << (32 - shift)) - 1))


def _signed(word: int) -> int:
    """A 32-bit word as a value of torch's int32."""
    return word - (1 << 32) if word >= 1 << 31 else word


class Noise:
    """Uniform and exponential noise over a vocabulary of `vocab_size` indices on `device`."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        # The index is hashed once; these are the hash's steps below, without the key.
        index_V = torch.arange(1, vocab_size + 1, dtype=torch.int32, device=device)
        self._index_V = _fold(_fold(_fold(index_V, 16).mul_(_signed(0x7FEB352D)), 15).mul_(_signed(0x846CA68B)), 16)

    def uniform(self, keys_B2: Tensor, ids_N: Tensor | None = None) -> Tensor:
        """Uniform noise in (0, 1), float32 (B, N), for all indices or for `ids_N`; `keys_B2` comes from `keys()`."""
        index_N = self._index_V if ids_N is None else self._index_V[ids_N]
        x_BN = index_N ^ keys_B2[:, :1]
        x_BN = _fold(x_BN, 16).mul_(_signed(0x7FEB352D)).bitwise_xor_(keys_B2[:, 1:])
        x_BN = _fold(_fold(x_BN, 15).mul_(_signed(0x846CA68B)), 16)
        return x_BN.bitwise_and_(0x7FFFFFFF).float().add_(0.5).mul_(_STEP).clamp_max_(_BELOW_ONE)

    def exponential(self, keys_B2: Tensor, ids_N: Tensor | None = None) -> Tensor:
        """Noise of the exponential distribution of rate 1, positive and finite, float32 (B, N).

        With weights w, the index of the greatest w / noise is distributed as w / sum(w): among independent exponentials
        with rates w, each is the smallest with that probability.
        """
        return self.uniform(keys_B2, ids_N).neg_().log1p_().neg_()
