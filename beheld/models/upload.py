"""Features on their way to the device, beside the step that runs there: nothing waits for them but who uses them."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

# Some fifty pictures of 448 x 448 pixels in bfloat16.
_STAGED_BYTES = 128 << 20
_ALIGN = 256


class Uploader:
    """Copies host tensors to one device.

    A copy from ordinary memory makes the host wait until the device has done all that was launched before. So content
    goes through pinned memory and a stream of its own, which the computing stream then waits for.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._staging: _Staging | None = None

    def __call__(self, host: Tensor) -> Tensor:
        """The same on the device."""
        if self._stream is None or host.device == self._device:
            return host.to(self._device)
        if self._staging is None:
            self._staging = _Staging(_STAGED_BYTES)
        staged = self._staging.hold(host)
        with torch.cuda.stream(self._stream):
            # A tensor too large to be staged may be dropped at once: its memory is used again only after the copy.
            moved = (host.pin_memory() if staged is None else staged).to(self._device, non_blocking=True)
            if staged is not None:
                self._staging.mark()
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        # Allocated on one stream and used on another: the memory must not be given away in between.
        moved.record_stream(current)
        return moved


class _Staging:
    """A ring of pinned memory. Pinning as much for each picture anew takes the system longer than copying it."""

    def __init__(self, size: int) -> None:
        self._ring = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        self._next = 0
        # Start, end, and when the copy from there is over; the oldest first.
        self._held: deque[tuple[int, int, torch.cuda.Event]] = deque()
        self._last = (0, 0)

    def hold(self, host: Tensor) -> Tensor | None:
        """The same in pinned memory, to be copied from on the stream that calls `mark`; None if too large, or empty."""
        size = host.numel() * host.element_size()
        if not 0 < size <= self._ring.numel() // 2:
            return None
        if self._next + size > self._ring.numel():
            # What lies behind, to the ring's end, is of the round before.
            while self._held and self._held[0][0] >= self._next:
                self._held.popleft()[2].synchronize()
            self._next = 0
        start = self._next
        while self._held and self._held[0][0] < start + size and start < self._held[0][1]:
            self._held.popleft()[2].synchronize()
        self._last = (start, start + size)
        self._next = -(-(start + size) // _ALIGN) * _ALIGN
        return self._ring[start : start + size].view(host.dtype).view(host.shape).copy_(host)

    def mark(self) -> None:
        """What was held last is free once the current stream has come this far."""
        event = torch.cuda.Event()
        event.record()
        self._held.append((*self._last, event))
