"""The option that names a folder in which engines keep the keys and values of prompts for one another."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from beheld.core.errors import ConfigError
from beheld.core.value_checks import known_keywords

OPTION = "kv_transfer_config"
CONNECTORS = ("ExampleConnector", "SharedStorageConnector")
"""The names under which vLLM's versions offer a folder."""
PRODUCERS = ("kv_producer", "kv_both")
CONSUMERS = ("kv_consumer", "kv_both")
_ROLES = ("kv_producer", "kv_consumer", "kv_both")
_POLICIES = ("recompute", "fail")
# What other ways than a folder need.
_IDLE = frozenset(
    ("enable_permute_local_kv", "kv_buffer_device", "kv_buffer_size", "kv_ip", "kv_parallel_size", "kv_port", "kv_rank")
)
_FOLDER = "shared_storage_path"
_BOUND = "max_bytes"
_EXAMPLE = (
    '{"kv_connector": "ExampleConnector", "kv_role": "kv_both", '
    '"kv_connector_extra_config": {"shared_storage_path": "FOLDER"}}'
)


@dataclass
class KVTransferConfig:
    """Where keys and values of prompts are kept outside of the engine. Names follow vLLM's class of the same name.

    What concerns other ways than a folder (ranks, addresses, ports, buffers) is accepted and has no effect.

    Attributes:
        kv_connector: the way; one of CONNECTORS, or None for none.
        kv_role: whether this engine keeps what it computes ("kv_producer"), takes what is there ("kv_consumer"), or
            both ("kv_both").
        kv_connector_extra_config: `shared_storage_path` is the folder; `max_bytes` is about the most that its files
            take together, without it there is no bound.
        kv_connector_module_path: a module with a class of the user's own, which `kv_connector` names and which decides
            what is taken from the folder; see kvstore/connector.py.
        kv_load_failure_policy: what a file that cannot be used means: "recompute" computes its positions, "fail" ends
            the request with an error.

    Raises:
        ConfigError: a keyword is unknown, or a value is wrong.
    """

    kv_connector: str | None = None
    engine_id: str | None = None
    kv_buffer_device: str = "cpu"
    kv_buffer_size: float = 1e9
    kv_role: str | None = None
    kv_rank: int | None = None
    kv_parallel_size: int = 1
    kv_ip: str = "127.0.0.1"
    kv_port: int = 14579
    kv_connector_extra_config: dict[str, Any] = field(default_factory=dict)
    kv_connector_module_path: str | None = None
    enable_permute_local_kv: bool = False
    kv_load_failure_policy: str = "recompute"

    def __new__(cls, *_: Any, **options: Any) -> KVTransferConfig:
        """Refuse an unknown keyword with an error that names it; a dataclass alone would raise a TypeError."""
        known_keywords(cls, options, ConfigError, f"entry of {OPTION}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if self.engine_id is None:
            self.engine_id = str(uuid.uuid4())
        if self.kv_connector is not None and self.kv_role is None:
            raise _wrong("kv_role is missing", f"Known: {', '.join(_ROLES)}.")
        for name, known in (("kv_role", _ROLES), ("kv_load_failure_policy", _POLICIES)):
            value = getattr(self, name)
            if value not in (known if name != "kv_role" else (None, *known)):
                raise _wrong(f"there is no {name} {value!r}", f"Known: {', '.join(known)}.")
        if not isinstance(self.kv_connector_extra_config, Mapping):
            raise _wrong(f"kv_connector_extra_config must be a mapping, got {self.kv_connector_extra_config!r}")

    @property
    def is_kv_transfer_instance(self) -> bool:
        """Whether it names a way."""
        return self.kv_connector is not None and self.kv_role is not None

    @property
    def is_kv_producer(self) -> bool:
        """Whether this engine keeps what it computes."""
        return self.kv_connector is not None and self.kv_role in PRODUCERS

    @property
    def is_kv_consumer(self) -> bool:
        """Whether this engine takes what is there."""
        return self.kv_connector is not None and self.kv_role in CONSUMERS

    def get_from_extra_config(self, key: str, default: Any) -> Any:
        """An entry of `kv_connector_extra_config`, or `default`."""
        return self.kv_connector_extra_config.get(key, default)

    @property
    def folder(self) -> Path:
        """The folder.

        Raises:
            ConfigError: none is named.
        """
        given = self.get_from_extra_config(_FOLDER, None)
        if not isinstance(given, str) or not given:
            raise _wrong(f"kv_connector_extra_config names no {_FOLDER}", f"Write {_EXAMPLE}.")
        return Path(given).expanduser().absolute()

    @property
    def max_bytes(self) -> int | None:
        """About the most that the folder's files take together; None for no bound.

        Raises:
            ConfigError: it is no whole number from 1.
        """
        given = self.get_from_extra_config(_BOUND, None)
        if given is not None and (isinstance(given, bool) or not isinstance(given, int) or given < 1):
            raise _wrong(f"{_BOUND} in kv_connector_extra_config must be a whole number from 1, got {given!r}")
        return given

    def without_effect(self) -> list[str]:
        """The names of what was given and changes nothing."""
        return [each.name for each in fields(self) if each.name in _IDLE and getattr(self, each.name) != each.default]

    def check(self) -> None:
        """Check that it is a way that is built.

        Raises:
            ConfigError: it is not.
        """
        if self.kv_connector not in CONNECTORS and self.kv_connector_module_path is None:
            raise ConfigError(
                f"{OPTION}: kv_connector={self.kv_connector!r} is not available here.",
                f"Built is a shared folder: {_EXAMPLE}.",
                param=OPTION,
            )
        _ = self.folder, self.max_bytes

    @classmethod
    def of(cls, given: Any) -> KVTransferConfig | None:
        """The user's choice, from a mapping, JSON, or an object with the same attributes; None if it names no way.

        Raises:
            ConfigError: it is none of these, or a value is wrong.
        """
        if isinstance(given, str):
            try:
                given = json.loads(given)
            except ValueError as error:
                raise _wrong(f"not JSON: {given!r}", f"Write {_EXAMPLE}.") from error
        if isinstance(given, Mapping):
            given = cls(**given)
        elif given is not None and not isinstance(given, cls):
            found = {each.name: getattr(given, each.name) for each in fields(cls) if hasattr(given, each.name)}
            if "kv_connector" not in found:
                raise _wrong(f"must be a mapping or a KVTransferConfig, got {given!r}", f"Write {_EXAMPLE}.")
            given = cls(**found)
        if given is None or given.kv_connector is None:
            return None
        given.check()
        return given


def _wrong(what: str, remedy: str = "") -> ConfigError:
    return ConfigError(f"{OPTION}: {what}.", remedy, param=OPTION)
