"""The user's options of a record of what the engine computes, which start_profile begins and stop_profile ends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from beheld.core.errors import ConfigError
from beheld.core.value_checks import known_keywords

_NAME = "profiler_config"
_WHOLE = "A record begins with start_profile and ends with stop_profile; leave it out."


@dataclass
class ProfilerConfig:
    """Where a record is written; vLLM's other fields are known so that they are accepted, or refused by name.

    Attributes:
        profiler: "torch", the only one; None is the same.
        torch_profiler_dir: the folder; empty for the one that BEHELD_PROFILES names.
        delay_iterations, max_iterations, warmup_iterations, wait_iterations: must be 0.
        others: have no effect: a record has all activities, without stacks, shapes or memory, and is not compressed.
    """

    profiler: str | None = None
    torch_profiler_dir: str = ""
    torch_profiler_activities: list[str] | None = None
    torch_profiler_with_stack: bool = True
    torch_profiler_with_flops: bool = False
    torch_profiler_use_gzip: bool = True
    torch_profiler_dump_cuda_time_total: bool = True
    torch_profiler_record_shapes: bool = False
    torch_profiler_with_memory: bool = False
    detailed_trace_annotation: bool = False
    ignore_frontend: bool = False
    active_iterations: int = 5
    capture_torch_profiler: bool = False
    delay_iterations: int = 0
    max_iterations: int = 0
    warmup_iterations: int = 0
    wait_iterations: int = 0

    def __new__(cls, *_: Any, **options: Any) -> ProfilerConfig:
        """Refuse an unknown keyword with an error that names it; a dataclass alone would raise a TypeError."""
        known_keywords(cls, options, ConfigError, f"entry of {_NAME}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if self.profiler not in (None, "torch"):
            raise ConfigError(f"{_NAME}: there is no profiler {self.profiler!r}.", "Known: 'torch'.", param=_NAME)
        if not isinstance(self.torch_profiler_dir, str):
            raise ConfigError(f"{_NAME}: torch_profiler_dir must be a folder's path.", param=_NAME)
        for name in ("delay_iterations", "max_iterations", "warmup_iterations", "wait_iterations"):
            if getattr(self, name):
                raise ConfigError(f"{_NAME}: {name} is not available here.", _WHOLE, param=_NAME)
        if self.capture_torch_profiler:
            raise ConfigError(f"{_NAME}: capture_torch_profiler is not available here.", _WHOLE, param=_NAME)

    @classmethod
    def of(cls, given: Any) -> ProfilerConfig:
        """The user's choices, from a mapping, an object with the same attributes, or None.

        Raises:
            ConfigError: it is none of these, or an entry is wrong.
        """
        if given is None or isinstance(given, cls):
            return given or cls()
        if isinstance(given, Mapping):
            return cls(**given)
        found = {each.name: getattr(given, each.name) for each in fields(cls) if hasattr(given, each.name)}
        if not found:
            raise ConfigError(
                f"{_NAME} must be a mapping or a ProfilerConfig, got {given!r}.",
                f"Write {_NAME}={{'profiler': 'torch', 'torch_profiler_dir': 'folder'}}.",
                param=_NAME,
            )
        return cls(**found)

    def without_effect(self) -> list[str]:
        """The names of what was given and changes nothing."""
        usual = asdict(ProfilerConfig())
        read = ("profiler", "torch_profiler_dir")
        return [name for name, value in asdict(self).items() if name not in read and value != usual[name]]
