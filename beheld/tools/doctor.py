"""A report on this machine: cores, memory, devices, libraries, and the decisions that follow."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
from typing import Any

from beheld.core.config import EngineArgs
from beheld.engine.setup import describe
from beheld.platform import host

_NEEDED = (
    *("torch", "torchvision", "transformers", "numpy", "pillow", "av", "httpx", "safetensors", "blake3", "tqdm"),
    "llguidance",
)
# Libraries of GPU kernels: Triton, and FlashAttention-3 under its two package names.
_OPTIONAL = ("llvmlite", "triton", "flash-attn-3", "fa3-fwd")


def examine() -> dict[str, Any]:
    """A report in plain JSON types; `ok` is True if the embedded model can run."""
    problems: list[str] = []
    libraries = {name: _version(name) for name in (*_NEEDED, *_OPTIONAL)}
    problems += [f"{name} is not installed." for name in _NEEDED if libraries[name] is None]
    decisions: dict[str, Any] = {}
    if not problems:
        try:
            info, config, sizes = describe(EngineArgs())
            decisions = {
                "model": info.name,
                "device": config.device,
                "dtype": config.dtype,
                "bfloat16 on this CPU": _bfloat16(),
                "int8 on this CPU": _int8(),
                "weights of few bits on this CPU": _few_bits(),
                **_long_prompts(),
                "max_model_len": config.max_model_len,
                "weights": f"{sizes['weights_bytes'] / 2**20:.1f} MiB",
            }
        except Exception as error:
            problems.append(f"The embedded model cannot be set up: {error}")
    return {
        "machine": _machine(),
        "libraries": {name: version or "not installed" for name, version in libraries.items()},
        "decisions": decisions,
        "problems": problems,
        "ok": not problems,
    }


def _machine() -> dict[str, Any]:
    free, total = host.memory()
    return {
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "cores": len(os.sched_getaffinity(0)),
        "memory": f"{total / 2**30:.1f} GiB, {free / 2**30:.1f} GiB free",
        "gpu": _gpu(),
    }


def _bfloat16() -> str:
    from beheld.platform.registry import CPU

    return "in hardware" if CPU.bfloat16_products else "slow: float32 is used instead"


def _int8() -> str:
    from beheld.platform.registry import CPU

    if CPU.no_grouped_products is None:
        return "multiplied in groups"
    return "in hardware" if CPU.int8_products else f"quantization='int8' is refused: {CPU.no_grouped_products}"


def _few_bits() -> str:
    from beheld.platform.registry import CPU

    missing = CPU.no_grouped_products
    return "multiplied as they are" if missing is None else f"dequantized at load: {missing}"


def _long_prompts() -> dict[str, str]:
    """What computes attention of long prompts on an accelerator; nothing where no kernel is made for them."""
    from beheld.platform.registry import accelerator

    found = accelerator()
    if found is None or not found.needs.warpgroup_products:
        return {}
    made_for = found.needs.warpgroup_products
    said = f"a kernel for {made_for}, unless its trial fails, which the log says"
    if not found.has_triton:
        said = "as for others: triton is not installed"
    elif not found.kernel_facts(found.device).warpgroup_products:
        said = f"as for others: their kernel is for {made_for}"
    elif importlib.util.find_spec("triton.experimental.gluon") is None:
        said = "as for others: this Triton lacks Gluon, in which their kernel is written"
    return {"attention of long prompts": said}


def _gpu() -> str:
    try:
        from beheld.platform.registry import accelerator
    except ImportError:
        return "unknown: torch is not installed"
    found = accelerator()
    return "none that torch supports" if found is None else found.describe()


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
