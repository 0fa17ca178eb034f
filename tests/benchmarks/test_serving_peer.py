"""The comparison with another server: its checkpoint, what it starts and ends, what it counts."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from benchmarks import serving_peer
from benchmarks.checkpoints import qwen2_5_vl_served
from benchmarks.serving_peer import Found, Side
from tests import tiny

# Answers two tokens, and to a second request none; starts a child that nobody else would end.
SERVER = """
import http.server, json, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
port = int(sys.argv[sys.argv.index("--port") + 1])

class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert asked["stream"] and asked["ignore_eos"], asked
        self.send_response(200)
        self.end_headers()
        if len(asked["messages"][0]["content"]) == 2 and "scene 1?" in asked["messages"][0]["content"][1]["text"]:
            self.wfile.write(b'data: {"error": {"code": 500}}\\n\\n')
            return
        for piece in ("a", "b"):
            chunk = {"choices": [{"delta": {"content": piece}}], "usage": None}
            self.wfile.write(f"data: {json.dumps(chunk)}\\n\\n".encode())
        end = {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 2}}
        self.wfile.write(f"data: {json.dumps(end)}\\n\\ndata: [DONE]\\n\\n".encode())

    def log_message(self, *_):
        pass

http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def test_every_id_of_the_served_checkpoint_is_a_piece_of_text(tmp_path: Path) -> None:
    path = qwen2_5_vl_served(tmp_path, "tiny")
    tokenizer = AutoTokenizer.from_pretrained(str(path))
    assert len(tokenizer) == 4096
    special = set(tokenizer.added_tokens_decoder)
    assert special == set(range(4096 - len(special), 4096))
    assert all(tokenizer.decode([token]) for token in range(4096))
    source = AutoTokenizer.from_pretrained(str(tiny.checkpoint("qwen2_5_vl")))
    assert tokenizer.encode("What is w500?") == source.encode("What is w500?")


def test_a_server_is_measured_and_ended_with_all_that_it_started(tmp_path: Path) -> None:
    given = argparse.Namespace(max_num_seqs=4, tokens=2, clients=[1, 2], requests=8, first=3)
    found = Found()
    side = Side([sys.executable, "-c", SERVER], {})
    with serving_peer.running(side, 4, tmp_path / "log") as (_, pid, _):
        family = serving_peer.family(pid)
        assert len(family) == 2
        assert serving_peer.resident_mib(pid) > serving_peer.resident_mib(family[1]) > 1
    assert not any(map(serving_peer.alive, family))
    serving_peer.measure(given, side, found, 0, tmp_path / "log")
    figures = serving_peer.figures(found)
    assert figures["errors"] == {"500": 3}, "three of four runs ask about a second scene, once each"
    assert len(found.first_s) == 2
    assert set(figures["tokens_per_s"]) == {"1", "2"}
    assert figures["start_to_first_answer_s"] > 0


def test_a_server_that_ends_before_it_answers_is_told_with_its_last_words(tmp_path: Path) -> None:
    side = Side([sys.executable, "-c", "raise SystemExit('no such model')"], {})
    with pytest.raises(SystemExit, match="no such model"), serving_peer.running(side, 4, tmp_path / "log"):
        pass


def test_pages_that_processes_share_count_once() -> None:
    code = "import os, time; data = bytearray(64 << 20); os.fork(); print(flush=True); time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.readline()
        family = serving_peer.family(process.pid)
        assert len(family) == 2
        assert 64 < serving_peer.resident_mib(process.pid) < 120
    finally:
        for pid in serving_peer.family(process.pid):
            os.kill(pid, 9)
        process.wait()
