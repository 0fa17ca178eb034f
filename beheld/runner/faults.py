"""Which errors of a device end one step, which end the device for this process, and what is tidied up after them."""

from __future__ import annotations

import torch

from beheld.core.errors import EngineDeadError
from beheld.utils.frames import clear_frames

_OUT_OF_MEMORY = "out of memory"
# How PyTorch and the libraries under it begin what a device said.
_DEVICE_SAYS = ("CUDA error:", "CUBLAS_STATUS_EXECUTION_FAILED", "CUDNN_STATUS_EXECUTION_FAILED", "NCCL error")

# What it says of a launch that it did not begin, for sizes that it does not take. Nothing was computed, and the driver
# does not hold it against what comes.
_NOT_LAUNCHED = ("invalid configuration argument", "invalid argument", "too many resources requested for launch")


def loss_of(error: Exception, device: torch.device) -> EngineDeadError | None:
    """What to raise instead of `error` if the device is lost with it; None if other steps can go on.

    After an illegal access, every later call on the device fails, or worse, gives what nobody computed. Where the
    message does not tell, the device is asked; that waits for it, which costs nothing once a step has failed.
    """
    if _of_memory(error):
        return None
    said = str(error)
    of_device = isinstance(error, torch.AcceleratorError) or any(word in said for word in _DEVICE_SAYS)
    if of_device and not any(word in said for word in _NOT_LAUNCHED):
        return _dead(said)
    if device.type == "cuda":
        try:
            torch.cuda.synchronize(device)
            if of_device and not _computes(device):
                return _dead(said)
        except RuntimeError as second:
            return _dead(str(second))
    return None


def _computes(device: torch.device) -> bool:
    return int(torch.arange(4, device=device).sum()) == 6


def let_go(error: Exception, device: torch.device) -> None:
    """Free what the failed attempt had taken on `device`, so that the next one has all memory that there was."""
    clear_frames(error)
    if _of_memory(error) and device.type == "cuda":
        # The next attempt, alone, may need in one piece what lies about in many.
        torch.cuda.empty_cache()


def _of_memory(error: Exception) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or _OUT_OF_MEMORY in str(error)


def _dead(said: str) -> EngineDeadError:
    first = (said.strip().splitlines() or ["no reason given"])[0].rstrip(".")
    return EngineDeadError(f"The device has failed: {first}.", "Start the engine anew.")
