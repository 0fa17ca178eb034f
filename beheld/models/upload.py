"""Features on their way to the device, beside the step that runs there: nothing waits for them but who uses them."""

from __future__ import annotations

import torch
from torch import Tensor


class Uploader:
    """Copies host tensors to one device.

    A copy from ordinary memory makes the host wait until the device has done all that was launched before. So content
    goes through pinned memory and a stream of its own, which the computing stream then waits for.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self, host: Tensor) -> Tensor:
        """The same on the device."""
        if self._stream is None or host.device == self._device:
            return host.to(self._device)
        with torch.cuda.stream(self._stream):
            # The pinned copy may be dropped at once: its memory is used again only when the copy from it is over.
            moved = host.pin_memory().to(self._device, non_blocking=True)
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        # Allocated on one stream and used on another: the memory must not be given away in between.
        moved.record_stream(current)
        return moved
