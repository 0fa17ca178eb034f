"""The classes of bodies of routes that few use are made by their first request, so that no start waits for them."""

from __future__ import annotations

import json
import subprocess
import sys

LATE = ["beheld.server.messages_schema", "beheld.server.openapi", "beheld.server.response_requests"]


def test_a_start_makes_no_bodies_of_messages_and_responses() -> None:
    script = "import json, sys, beheld.server.app; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    loaded = json.loads(done.stdout)
    assert "beheld.server.schema" in loaded
    assert not set(LATE) & set(loaded)
