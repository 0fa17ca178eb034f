"""What scripts ask of vLLM's process and device helpers."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable

from beheld.utils.log import get_logger


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Free the memory of engines that nothing refers to any more."""
    import torch

    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


def print_embeddings(embeds: list[float], prefix: str = "Embeddings") -> None:
    """Print the first four numbers of a vector, and how many it has."""
    shown = ", ".join(str(number) for number in embeds[:4])
    print(f"{prefix}: [{shown}{', ...' if len(embeds) > 4 else ''}] (size={len(embeds)})")


def init_logger(name: str) -> logging.Logger:
    """A logger that writes as beheld's do."""
    return get_logger(name)


class ScriptPlatform:
    """The device as scripts ask for it."""

    @property
    def device_type(self) -> str:
        """The device's name in torch."""
        import torch

        found = torch.accelerator.current_accelerator(check_available=True)
        return "cpu" if found is None else str(found.type)

    device_name = device_type

    def __getattr__(self, name: str) -> Callable[[], bool]:
        """`is_KIND()`: whether the device is of this kind."""
        if not name.startswith("is_"):
            raise AttributeError(name)
        return lambda: name.removeprefix("is_").removesuffix("_alike") == self.device_type


current_platform = ScriptPlatform()
