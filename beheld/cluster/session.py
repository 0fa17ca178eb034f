"""This process's connection to Ray, which is optional."""

from __future__ import annotations

import importlib
import os
from typing import Any

from beheld.core.errors import ConfigError
from beheld.utils.log import get_logger

logger = get_logger(__name__)

# Of a Ray that serves this process alone: beheld puts little there. A cluster has its own.
_STORE_BYTES = 100 << 20


def need_ray(asking: str, param: str | None = None) -> Any:
    """Return the module.

    Args:
        asking: the option that needs it, for the message.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise ConfigError(
            f"{asking} needs Ray, which is not installed.",
            "Run: pip install 'beheld[ray]', on every host, or leave the option out.",
            param=param,
        ) from error


def connected(asking: str, param: str | None = None) -> Any:
    """Return the module, connected to the cluster of RAY_ADDRESS or of this host, or else to a Ray of its own.

    Raises:
        ConfigError: Ray is not installed, or the cluster does not answer.
    """
    ray = need_ray(asking, param)
    if ray.is_initialized():
        return ray
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    quiet = {"log_to_driver": False, "configure_logging": False, "logging_level": "ERROR"}
    named = os.environ.get("RAY_ADDRESS")
    try:
        ray.init(address="auto", **quiet)
    except ConnectionError as error:
        if named:
            raise ConfigError(
                f"The Ray cluster at RAY_ADDRESS={named!r} does not answer.",
                "Start it (ray start --head), or unset RAY_ADDRESS.",
                param=param,
            ) from error
        logger.info("No Ray cluster runs on this host; Ray is started for this process alone.")
        ray.init(address="local", object_store_memory=_STORE_BYTES, include_dashboard=False, **quiet)
    return ray
