"""When an operation suits a model: which device it runs on, in which type, and which options are set."""

from __future__ import annotations

from beheld.models.surgery.linears import can_pack
from beheld.models.surgery.operation import Target
from beheld.platform.registry import platform_of
from beheld.utils import env


def on_cpu(target: Target) -> bool:
    """Return whether layers take the forms of a CPU."""
    return platform_of(target.config.device).packs_linears and not target.config.enforce_eager


def _on_gpu(target: Target) -> bool:
    return not platform_of(target.config.device).packs_linears and not target.config.enforce_eager


def shared(target: Target) -> bool:
    """Return whether several ranks share the model."""
    return target.ranks is not None


def float32(target: Target) -> bool:
    """Return whether the model computes in float32."""
    return bool(target.config.dtype == "float32")


def packs(target: Target) -> bool:
    """Return whether linear layers are replaced by ones with their weights in a better order."""
    if not on_cpu(target):
        return False
    in_hardware = target.config.dtype == "bfloat16" and platform_of(target.config.device).bfloat16_products
    return float32(target) or (in_hardware and can_pack())


def fuses_on_gpu(target: Target) -> bool:
    """Return whether modules are joined for a GPU."""
    return _on_gpu(target) and env.FUSE()


def has_row_kernels(target: Target) -> bool:
    """Return whether the device has kernels of ours for a single row."""
    return fuses_on_gpu(target) and not float32(target) and platform_of(target.config.device).one_row_kernels


def compiles(target: Target) -> bool:
    """Return whether layers are compiled."""
    return platform_of(target.config.device).compiles_layers and not target.config.enforce_eager and env.COMPILE()
