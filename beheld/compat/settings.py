"""Configuration objects that scripts make for options which are refused by name."""

from __future__ import annotations

from typing import Any


class KVTransferConfig:
    """What `kv_transfer_config` is given. LLM refuses the option and says what to do."""

    def __init__(self, **options: Any) -> None:
        self.__dict__.update(options)
