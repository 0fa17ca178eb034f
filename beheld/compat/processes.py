"""What scripts ask of vLLM's process and device helpers."""

from __future__ import annotations

import gc
import logging
from typing import Any

from beheld.utils.log import get_logger


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Free the memory of engines that nothing refers to any more."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def init_logger(name: str) -> logging.Logger:
    """A logger that writes as beheld's do."""
    return get_logger(name)


class Platform:
    """The device as scripts ask for it."""

    @property
    def device_type(self) -> str:
        """The device's name in torch: "cuda" or "cpu"."""
        import torch

        return "cuda" if torch.cuda.is_available() else "cpu"

    device_name = device_type

    def is_cuda(self) -> bool:
        """Whether it is a GPU of NVIDIA's."""
        return self.device_type == "cuda"

    is_cuda_alike = is_cuda

    def is_cpu(self) -> bool:
        """Whether it is the CPU."""
        return self.device_type == "cpu"

    def is_rocm(self) -> bool:
        """False: there is no such platform here."""
        return False

    is_xpu = is_tpu = is_rocm

    def get_device_name(self, device_id: int = 0) -> str:
        """The device's product name."""
        import torch

        return str(torch.cuda.get_device_name(device_id)) if self.is_cuda() else "cpu"

    def get_device_capability(self, device_id: int = 0) -> Any:
        """(major, minor) of a GPU; None for the CPU."""
        import torch

        return torch.cuda.get_device_capability(device_id) if self.is_cuda() else None


current_platform = Platform()
