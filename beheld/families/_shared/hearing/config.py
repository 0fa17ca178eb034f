"""How many states Wav2Vec 2's convolutions, and encoders that begin as it does, make of a waveform."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Samples of the longest audio that is heard at once: a minute.
MOST_SAMPLES = 60 * 16000
_KERNELS, _STRIDES = (10, 3, 3, 3, 3, 2, 2), (5, 2, 2, 2, 2, 2, 2)


def states_of(encoder: Mapping[str, Any], samples: int) -> int:
    """Return the number of states by the encoder's configuration, with an adapter if it has one."""
    kernels, strides = encoder.get("conv_kernel", _KERNELS), encoder.get("conv_stride", _STRIDES)
    for kernel, stride in zip(kernels, strides, strict=True):
        samples = (samples - kernel) // stride + 1
    for _ in range(encoder.get("num_adapter_layers", 3) if encoder.get("add_adapter") else 0):
        samples = (samples - 1) // encoder.get("adapter_stride", 2) + 1
    return samples
