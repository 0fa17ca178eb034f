"""A hub without a network: repositories in memory behind the hub's own library, which keeps its cache as always."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub._snapshot_download as library
import pytest
from huggingface_hub import HfApi
from huggingface_hub.errors import OfflineModeIsEnabled
from huggingface_hub.hf_api import RepoFile

COMMIT = "a" * 40


def git_hash(content: bytes) -> str:
    """What git calls a file with this content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def large(file: str, content: bytes) -> dict[str, Any] | None:
    """What the hub says of a large file."""
    if not file.endswith(".safetensors"):
        return None
    return {"size": len(content), "oid": hashlib.sha256(content).hexdigest(), "pointerSize": 130}


@dataclass
class Hub:
    """Repositories and what was asked of them.

    Attributes:
        cache: the folder where fetched files go.
        files_by_name: repository -> file -> its content.
        online: whether anybody answers.
        fetched: files that were fetched, in any order, since `forget`.
        questions: other questions, about revisions and lists of files.
        cards: repository -> what heads its card.
    """

    cache: Path
    files_by_name: dict[str, dict[str, bytes]] = field(default_factory=dict)
    online: bool = True
    fetched: list[str] = field(default_factory=list)
    questions: int = 0
    cards: dict[str, dict[str, str]] = field(default_factory=dict)

    def publish(self, name: str, files: Mapping[str, bytes | dict[str, Any]]) -> None:
        """Put a repository there."""
        self.files_by_name[name] = {
            file: json.dumps(content).encode() if isinstance(content, dict) else content
            for file, content in files.items()
        }

    def folder(self, name: str) -> Path:
        """The cached folder of a repository."""
        return self.cache / f"models--{name.replace('/', '--')}" / "snapshots" / COMMIT

    def cached(self, name: str) -> list[str]:
        """The files of a repository that are in the cache."""
        folder = self.folder(name)
        return sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())

    def lay(self, name: str, *files: str) -> None:
        """Put these files into the cache as a program does that fetches file by file."""
        refs = self.folder(name).parents[1] / "refs"
        refs.mkdir(parents=True, exist_ok=True)
        (refs / "main").write_text(COMMIT)
        for file in files:
            self._write(name, file)

    def forget(self) -> None:
        """Begin a new count."""
        self.fetched.clear()
        self.questions = 0

    def enter(self, patch: pytest.MonkeyPatch) -> None:
        """Stand where the network was."""
        patch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(self.cache))
        patch.setattr(HfApi, "repo_info", lambda api, **asked: self._info(asked["repo_id"]))
        patch.setattr(HfApi, "list_repo_tree", lambda api, repo_id, **asked: self._tree(repo_id))
        patch.setattr(HfApi, "model_info", lambda api, repo_id, **asked: self._card(repo_id))
        patch.setattr(library, "hf_hub_download", self._download)

    def _answer(self) -> None:
        if not self.online:
            raise OfflineModeIsEnabled("the hub was asked while the network was off")
        self.questions += 1

    def _info(self, name: str) -> SimpleNamespace:
        self._answer()
        assert name in self.files_by_name, name
        return SimpleNamespace(sha=COMMIT)

    def _tree(self, name: str) -> list[RepoFile]:
        self._answer()
        return [
            RepoFile(path=file, size=len(content), oid=git_hash(content), lfs=large(file, content))
            for file, content in self.files_by_name[name].items()
        ]

    def _card(self, name: str) -> SimpleNamespace:
        self._answer()
        return SimpleNamespace(card_data=self.cards.get(name))

    def _download(self, name: str, *, filename: str, revision: str, cache_dir: str, **_: Any) -> str:
        assert (revision, cache_dir) == (COMMIT, str(self.cache.resolve()))
        path = self.folder(name) / filename
        if not path.is_file():
            if not self.online:
                raise OfflineModeIsEnabled("a file was asked for while the network was off")
            self.fetched.append(filename)
            self._write(name, filename)
        return str(path)

    def _write(self, name: str, file: str) -> None:
        path = self.folder(name) / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(self.files_by_name[name][file])
