"""A deployment for Ray Serve, which starts and ends engines as the load asks for.

    serve run beheld.serve_ray:app model=Qwen/Qwen2.5-VL-7B-Instruct max_replicas=4 tensor_parallel_size=2

Each replica is a whole server: the routes, the input pipeline and the engine. How many there are follows from the
requests that wait for a place in a step, and from the share of the KV cache that is in use.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from starlette.types import Receive, Scope, Send

from beheld.cluster.remote import Secrets, environment
from beheld.cluster.session import need_ray
from beheld.core.config import EngineArgs
from beheld.core.engine_numbers import check_numbers
from beheld.core.errors import ConfigError
from beheld.platform.probe import has_accelerator
from beheld.server.options import ServerOptions

QUEUE, KV = "waiting", "kv_use"
# A replica is full with so many waiting requests, or so much of its KV cache in use.
WAITING_EACH, KV_EACH = 8.0, 0.8
_OWN = {"min_replicas": 1, "max_replicas": 1}
# Requests that Ray Serve sends to a replica at once; what exceeds them waits in its router.
_ONGOING = 1024


def desired(waiting: Iterable[float], kv_use: Iterable[float], current: int) -> int:
    """Return how many replicas would carry the load with each below its limits.

    Args:
        waiting: of each replica, the requests that wait for a place in a step.
        kv_use: of each replica, the share of the KV cache in use, from 0 to 1.
        current: how many there are; kept until they have reported.
    """
    waits, uses = list(waiting), list(kv_use)
    if not waits or not uses:
        return current
    # Rounded, for three times 0.8 is more than 2.4 in floating point.
    wanted = max(sum(waits) / WAITING_EACH, sum(uses) / KV_EACH)
    return max(1, math.ceil(round(wanted, 6)))


def policy(context: Any) -> tuple[int, dict[str, Any]]:
    """Ray Serve's autoscaling policy; see `desired`. Ray keeps the result within the bounds, and smooths it."""
    found = context.aggregated_metrics or {}
    waits, uses = (list(found.get(name, {}).values()) for name in (QUEUE, KV))
    return desired(waits, uses, context.current_num_replicas), {}


class Entrance:
    """The application that Ray Serve calls; it passes requests on to that of its replica."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] == "lifespan":
            # The replica has started before, and ends after.
            for step in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{step}.complete"})
            return
        serve = importlib.import_module("ray.serve")
        replica = serve.get_replica_context().servable_object
        await replica.application(scope, receive, send)


class Replica:
    """One server.

    Args:
        model, options: as AsyncLLM.
        secrets: variables of the process that made the application.
    """

    def __init__(self, model: str | None, options: dict[str, Any], secrets: Secrets) -> None:
        secrets.set()
        from beheld.api.async_llm import AsyncLLM
        from beheld.cli.serve import _names
        from beheld.server.app import Service

        names = tuple(options.get("served_model_name") or _names(model))
        self._llm = AsyncLLM(model, **options)
        alias = () if model is None or model in names else (model,)
        key = os.environ.get("BEHELD_API_KEY")
        # Ray's proxy is in front; who may reach it is said there.
        server = ServerOptions(names=names, aliases=alias, host="0.0.0.0", api_keys=(key,) if key else ())
        self.application = Service(self._llm, server).app()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Tell Ray Serve what `policy` asks for."""
        stats = (await self._llm.ping()).scheduler
        groups = zip(stats.num_free_blocks, stats.num_blocks, strict=True)
        return {
            QUEUE: float(stats.num_waiting),
            KV: max((1 - free / most for free, most in groups if most), default=0.0),
        }

    def check_health(self) -> None:
        """Raise if the engine has died; Ray Serve then starts another replica."""
        if not self._llm.alive:
            raise RuntimeError(self._llm.reason)


def options_of(given: Mapping[str, Any]) -> tuple[str | None, dict[str, Any], dict[str, int]]:
    """Return the model, the engine's options and the bounds on replicas.

    Args:
        given: the arguments of `serve run`, as text, or those of a configuration file.

    Raises:
        ConfigError: there is no such option, or a number is malformed or out of range.
    """
    fields = {field.name: str(field.type) for field in dataclasses.fields(EngineArgs)}
    options, bounds = dict[str, Any](), dict(_OWN)
    for name, value in given.items():
        key = name.replace("-", "_")
        if key in bounds:
            try:
                bounds[key] = int(value)
            except ValueError as error:
                raise ConfigError(f"{key}={value!r} is no whole number.", param=key) from error
        elif key in fields:
            options[key] = _value(value, fields[key])
        else:
            raise ConfigError(
                f"There is no option {name!r}.", "Give options of the engine, as LLM has them.", param=key
            )
    if not 0 < bounds["min_replicas"] <= bounds["max_replicas"]:
        raise ConfigError("min_replicas must be from 1 to max_replicas.", param="min_replicas")
    # A replica that refuses a count would be started again and again.
    check_numbers(EngineArgs(**options))
    return options.pop("model", None), options, bounds


def _value(given: Any, kind: str) -> Any:
    """Return an argument's value: numbers, switches and JSON arrive as text."""
    if not isinstance(given, str) or kind.startswith("str"):
        return given
    words = {"True": True, "False": False, "None": None}
    try:
        return words[given] if given in words else json.loads(given)
    except ValueError:
        return given


def app(given: dict[str, Any]) -> Any:
    """Build the application, for `serve run beheld.serve_ray:app`.

    Raises:
        ConfigError: Ray is not installed, or as `options_of`.
    """
    need_ray("beheld.serve_ray")
    serve = importlib.import_module("ray.serve")
    model, options, bounds = options_of(given)
    ranks = options.get("tensor_parallel_size", 1) * options.get("pipeline_parallel_size", 1)
    # Ray places the other ranks itself if they may be on other hosts.
    here = 1 if options.get("distributed_executor_backend") == "ray" else ranks
    own = here if has_accelerator(options.get("device")) else 0
    deployment = serve.deployment(
        name="beheld",
        max_ongoing_requests=_ONGOING,
        autoscaling_config={**bounds, "policy": {"policy_function": "beheld.serve_ray:policy"}},
        ray_actor_options={
            "num_cpus": 0 if own else 1,
            "num_gpus": own,
            "runtime_env": {"env_vars": environment(os.environ, sys.path)},
        },
    )
    return deployment(serve.ingress(Entrance())(Replica)).bind(model, options, Secrets.of(os.environ))
