"""NVIDIA's driver, as far as it is asked before torch is imported."""

from __future__ import annotations

from pathlib import Path

from beheld.platform.driver import Driver

DRIVER = Driver(
    name="cuda",
    file=Path("/dev/nvidiactl"),
    device_files="nvidia[0-9]*",
    visible="CUDA_VISIBLE_DEVICES",
    library="libcuda.so.1",
    start="cuInit",
    prefixes=("NCCL_",),
)
