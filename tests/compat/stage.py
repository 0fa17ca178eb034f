"""A machine without a network on which a script runs: laid repositories, copies of addresses, assets, what it asked."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest

from beheld import LLM, RequestOutput
from beheld.cli.main import main
from beheld.utils.log import get_logger


@dataclass
class Stage:
    """Where the scripts of one test session find what they ask for.

    Attributes:
        folder: everything lies below it.
        outputs: what the engines of the scripts answered, call by call, since `enter`.
        said: what beheld logged since then.
    """

    folder: Path
    outputs: list[list[RequestOutput]] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    @property
    def hub(self) -> Path:
        """The cache of repositories."""
        return self.folder / "hub"

    @property
    def copies(self) -> Path:
        """The copies of addresses."""
        return self.folder / "copies"

    @property
    def assets(self) -> Path:
        """The assets."""
        return self.folder / "assets"

    def environment(self) -> dict[str, str]:
        """Variables under which a process finds all this."""
        return {
            "BEHELD_ASSETS_CACHE": str(self.assets),
            "BEHELD_CPU_KV_CACHE_GIB": "0.25",
            "BEHELD_MEDIA_CACHE": str(self.copies),
            "HF_HUB_CACHE": str(self.hub),
            "HF_HUB_OFFLINE": "1",
        }

    def enter(self, patch: pytest.MonkeyPatch) -> None:
        """Make this process such a machine, and note what engines answer."""
        for name, value in self.environment().items():
            patch.setenv(name, value)
        patch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(self.hub))
        self.outputs.clear()
        self.said.clear()
        log = get_logger("beheld")
        patch.setattr(log, "handlers", [*log.handlers, _Notes(self.said)])
        collect = LLM._all

        def noted(llm: LLM, *arguments: Any, **options: Any) -> list[RequestOutput]:
            self.outputs.append(collect(llm, *arguments, **options))
            return self.outputs[-1]

        patch.setattr(LLM, "_all", noted)

    def run(self, source: str, *words: str) -> int:
        """Run a script with arguments through the command line; returns the exit status."""
        path = self.folder / "script.py"
        path.write_text(source, encoding="utf-8")
        return main(["run-vllm", str(path), *words])


class _Notes(logging.Handler):
    """Writes messages into a list."""

    def __init__(self, said: list[str]) -> None:
        super().__init__()
        self._said = said

    def emit(self, record: logging.LogRecord) -> None:
        """Write one down."""
        self._said.append(record.getMessage())


def check(outputs: list[RequestOutput], printed: str, count: int, media: int) -> None:
    """Each of `count` answers was finished and printed, and its prompt showed `media` items to the model."""
    assert len(outputs) == count
    for output in outputs:
        (answer,) = output.outputs
        assert output.finished
        assert output.error is None
        assert answer.token_ids
        assert answer.text.strip() in printed
        assert len(output.media) == media, json.dumps([receipt.to_json() for receipt in output.media])
        assert all(receipt.tokens > 0 for receipt in output.media)
