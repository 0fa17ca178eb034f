"""Memory of one GPU that the processes of other GPUs write to directly, over NVLink or PCIe (CUDA's "IPC" memory).

It is taken from the driver, not from PyTorch, whose own sharing counts references by files and needs pickles.
"""

from __future__ import annotations

import ctypes

import torch

from beheld.platform.cuda_driver import DRIVER

_HANDLE_BYTES = 64
# Access to the other GPU's memory is opened when it is first used.
_LAZY_PEER_ACCESS = 1


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_char * _HANDLE_BYTES),)


class CudaPeers:
    """See PeerMemory."""

    handle_bytes = _HANDLE_BYTES

    def __init__(self) -> None:
        # The context of this thread is PyTorch's.
        torch.cuda.synchronize()
        self._driver = ctypes.CDLL(DRIVER.library)
        self._driver.cuIpcOpenMemHandle_v2.argtypes = [ctypes.c_void_p, _Handle, ctypes.c_uint]
        self._own: list[int] = []
        self._opened: list[int] = []

    def allocate(self, num_bytes: int) -> tuple[int, bytes]:
        """See PeerMemory."""
        address = ctypes.c_uint64()
        self._done("cuMemAlloc", self._driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(num_bytes)))
        self._own.append(address.value)
        zeroed = self._driver.cuMemsetD8_v2(
            ctypes.c_uint64(address.value), ctypes.c_ubyte(0), ctypes.c_size_t(num_bytes)
        )
        self._done("cuMemsetD8", zeroed)
        torch.cuda.synchronize()
        handle = _Handle()
        self._done(
            "cuIpcGetMemHandle", self._driver.cuIpcGetMemHandle(ctypes.byref(handle), ctypes.c_uint64(address.value))
        )
        return address.value, bytes(handle)

    def open(self, handle: bytes) -> int:
        """See PeerMemory."""
        address = ctypes.c_uint64()
        theirs = _Handle.from_buffer_copy(handle)
        found = self._driver.cuIpcOpenMemHandle_v2(ctypes.byref(address), theirs, _LAZY_PEER_ACCESS)
        self._done("cuIpcOpenMemHandle", found)
        self._opened.append(address.value)
        return address.value

    def close(self) -> None:
        """See PeerMemory."""
        for address in self._opened:
            self._driver.cuIpcCloseMemHandle(ctypes.c_uint64(address))
        for address in self._own:
            self._driver.cuMemFree_v2(ctypes.c_uint64(address))
        self._opened.clear()
        self._own.clear()

    def _done(self, call: str, code: int) -> None:
        if code:
            raise RuntimeError(f"{call} failed with code {code}")
