"""What scripts ask of vLLM's process and device helpers."""

from __future__ import annotations

import gc
import logging

from beheld.utils.log import get_logger


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Free the memory of engines that nothing refers to any more."""
    import torch

    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


def init_logger(name: str) -> logging.Logger:
    """A logger that writes as beheld's do."""
    return get_logger(name)


class ScriptPlatform:
    """The device as scripts ask for it."""

    @property
    def device_type(self) -> str:
        """The device's name in torch."""
        import torch

        found = torch.accelerator.current_accelerator()
        return "cpu" if found is None else str(found.type)

    device_name = device_type

    def is_cuda(self) -> bool:
        """Whether it is a GPU; NVIDIA's are the only ones."""
        return not self.is_cpu()

    is_cuda_alike = is_cuda

    def is_cpu(self) -> bool:
        """Whether it is the CPU."""
        return self.device_type == "cpu"

    def is_rocm(self) -> bool:
        """False: there is no such platform here."""
        return False

    is_xpu = is_tpu = is_rocm


current_platform = ScriptPlatform()
