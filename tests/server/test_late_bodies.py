"""The classes of bodies of routes that few use are made by their first request, so that no start waits for them."""

from __future__ import annotations

import errno
import importlib.abc
import json
import subprocess
import sys
from typing import Any

import pytest

from tests.server.running import Running

LATE = ["beheld.server.messages_schema", "beheld.server.openapi", "beheld.server.responses_schema"]


def test_of_all_bodies_a_start_makes_the_check_of_chats_alone() -> None:
    """It does not even load those of messages and responses."""
    script = (
        "import json, sys, beheld.server.app\n"
        "print(json.dumps(sorted(sys.modules)))\n"
        "from unittest.mock import MagicMock\n"
        "import pydantic\n"
        "from beheld.server import app, options, pooling_schema, schema, tools_schema\n"
        "def made(kind): return kind.__pydantic_complete__\n"
        "def below(kind): return [each for k in kind.__subclasses__() for each in (k, *below(k))]\n"
        "ours = [kind for kind in below(pydantic.BaseModel) if kind.__module__.startswith('beheld.')]\n"
        "assert schema.ChatRequest in ours\n"
        "assert not any(map(made, ours)), [kind for kind in ours if made(kind)]\n"
        "llm = MagicMock(chat_template='')\n"
        "llm.config.max_model_len, llm.info.pooler = 64, None\n"
        "app.Service(llm, options.ServerOptions())\n"
        "assert made(schema.ChatRequest)\n"
        "left = [schema.Message, tools_schema.Tool, pooling_schema.EmbeddingRequest, schema.CompletionRequest]\n"
        "assert not any(map(made, left)), left"
    )
    done = subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.PIPE, text=True)
    loaded = json.loads(done.stdout)
    assert "beheld.server.schema" in loaded
    assert not set(LATE) & set(loaded)


class NoDescriptors(importlib.abc.MetaPathFinder):
    """Imports as they fail in a process that has no descriptors left."""

    def find_spec(self, name: str, *given: Any) -> Any:
        """Refuse the modules that come late."""
        if name in LATE:
            raise OSError(errno.EMFILE, "Too many open files")
        return None


@pytest.mark.parametrize(
    ("route", "module", "body"),
    [
        ("/v1/messages", LATE[0], {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}),
        ("/v1/messages/count_tokens", LATE[0], {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/responses", LATE[2], {"input": "x", "max_output_tokens": 1}),
    ],
)
def test_a_first_request_that_finds_no_descriptors_is_told_so_and_the_next_is_answered(
    running: Running, monkeypatch: pytest.MonkeyPatch, route: str, module: str, body: dict[str, Any]
) -> None:
    with monkeypatch.context() as tight:
        tight.delitem(sys.modules, module, raising=False)
        package, _, name = module.rpartition(".")
        tight.delattr(sys.modules[package], name, raising=False)
        tight.setattr(sys, "meta_path", [NoDescriptors(), *sys.meta_path])
        answer = running.post(route, body)
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) > 0
        assert "too many open files" in answer.text
    assert running.post(route, body).status_code == 200
