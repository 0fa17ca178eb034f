"""The methods that quantize any checkpoint's weights as they are loaded, before torch is imported: where each runs.

The methods themselves are in registry.AT_LOAD, by the same names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from beheld.core.errors import ConfigError
from beheld.platform.platform import Platform
from beheld.utils import env


@dataclass(frozen=True)
class Unavailable:
    """Why a method does not run somewhere.

    Attributes:
        reason: the end of "It is not available on this device: ...".
        remedy: what to do.
    """

    reason: str
    remedy: str


@dataclass(frozen=True)
class Method:
    """What is known of a method without torch.

    Attributes:
        missing: says, of a platform and the type of computation, why the method does not run there; None if it does.
        in_groups: whether a CPU multiplies groups of its numbers by compiled code.
    """

    missing: Callable[[Platform, str], Unavailable | None]
    in_groups: bool = False


def _no_nf4(platform: Platform, dtype: str) -> Unavailable | None:
    if platform.shares_host_memory:
        return None
    return Unavailable(
        "it saves memory on a CPU. Weights are dequantized in each product",
        "Leave the option out, add device='cpu', or use a checkpoint that is quantized.",
    )


def _no_int4(platform: Platform, dtype: str) -> Unavailable | None:
    missing = platform.no_grouped_products
    if missing is None:
        return None
    from beheld.platform.registry import PLATFORMS

    # Another device may be the remedy.
    return Unavailable(missing, " ".join(filter(None, (each.needs.grouped_products for each in PLATFORMS.values()))))


def _no_int8(platform: Platform, dtype: str) -> Unavailable | None:
    if platform.shares_host_memory:
        missing = platform.no_grouped_products
        if platform.int8_products or missing is None:
            return None
        reason = f"{missing}, and oneDNN's products of bytes need AVX512-VNNI, AVX-VNNI or AMX"
    else:
        unable = platform.no_int8_rows
        if unable is None and dtype != "float32":
            return None
        reason = unable or "activations are rounded from bfloat16 or float16, and dtype is 'float32'"
    from beheld.platform.registry import PLATFORMS

    # Another device may be the remedy.
    ways = (each.needs.int8_rows for each in PLATFORMS.values())
    return Unavailable(reason, " ".join(filter(None, ("On a CPU with AVX2: pip install llvmlite.", *ways))))


def _no_fp8(platform: Platform, dtype: str) -> Unavailable | None:
    if platform.shares_host_memory:
        return None
    if not platform.fp8_products:
        reason = "it has no products of FP8 numbers"
    elif not platform.has_triton:
        reason = "Triton, which rounds activations, is not installed"
    elif not env.FP8():
        reason = "BEHELD_FP8=0"
    elif dtype != "bfloat16":
        reason = f"products of FP8 numbers are given in bfloat16, and dtype is {dtype!r}"
    else:
        return None
    return Unavailable(
        reason,
        f"It needs {platform.needs.fp8_products}, Triton and dtype='bfloat16'. Otherwise leave the option out, or add "
        "device='cpu'.",
    )


AT_LOAD_METHODS = {
    "fp8": Method(_no_fp8),
    "int4": Method(_no_int4, in_groups=True),
    "int8": Method(_no_int8, in_groups=True),
    "nf4": Method(_no_nf4),
}


def check_at_load(name: str, asked: str, platform: Platform, dtype: str) -> None:
    """Refuse a method where it does not run.

    Args:
        asked: how the user calls it.
        dtype: the type of computation.

    Raises:
        ConfigError: as above.
    """
    missing = AT_LOAD_METHODS[name].missing(platform, dtype)
    if missing is not None:
        message = f"quantization={asked!r} is not available {platform.place}: {missing.reason}."
        raise ConfigError(message, missing.remedy, param="quantization")
