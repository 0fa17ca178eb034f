"""Runs a folder of vLLM's example clients as they stand against `beheld serve`, and prints a row for each.

    python -m tests.compat.example_clients FOLDER [--only TEXT] [--stage FOLDER] [--python FILE]

FOLDER is a copy of vLLM's examples/online_serving. The clients speak to port 8000, so it must be free. --python is a
Python for the clients of OLDER, with torch, openai and transformers 4, which vLLM 0.12.0 asks for. SERVERS says which
server each needs; the rows mean the same as those of tests/compat/examples.py. Scripts for clusters, for the
page of another program or for data bases are left out: SERVERS does not name them.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests import tiny
from tests.compat import example_repositories, examples, scripted
from tests.compat.stage import Stage

TOOLS = "--enable-auto-tool-choice --tool-call-parser hermes"
# Model and flags of a server -> the clients that it answers, with their arguments.
SERVERS: Mapping[tuple[str, str], Mapping[str, str]] = {
    ("qwen2", f"{TOOLS} --max-model-len 2048 --served-model-name tiny Qwen/Qwen3-8B"): {
        "api_client.py": "",
        "openai_chat_completion_client.py": "",
        "openai_chat_completion_client_for_multimodal.py": "-c text-only",
        "openai_chat_completion_client_with_tools_required.py": "",
        "openai_chat_completion_client_with_tools_xlam.py": "",
        "openai_chat_completion_client_with_tools_xlam_streaming.py": "",
        "openai_chat_completion_with_reasoning.py": "",
        "openai_chat_completion_with_reasoning_streaming.py": "",
        "openai_completion_client.py": "",
        "openai_responses_client.py": "",
        "openai_responses_client_with_mcp_tools.py": "",
        "openai_responses_client_with_tools.py": "",
        "structured_outputs/structured_outputs.py": "",
    },
    ("Qwen/Qwen3-0.6B", "--max-model-len 2048 --served-model-name Qwen/Qwen3-0.6B"): {
        "token_generation_client.py": "",
    },
    (examples.LLAMA, f"--enable-prompt-embeds --served-model-name {examples.LLAMA}"): {
        "prompt_embed_inference_with_openai_client.py": "",
    },
    ("calls", f"{TOOLS} --reasoning-parser deepseek_r1 --max-model-len 2048 --served-model-name tiny"): {
        "openai_chat_completion_client_with_tools.py": "",
        "openai_chat_completion_tool_calls_with_reasoning.py": "",
    },
    ("whisper", "--served-model-name openai/whisper-large-v3"): {
        "openai_transcription_client.py": "",
        "openai_translation_client.py": "",
    },
    ("intfloat/e5-small", '--hf-overrides {"is_matryoshka":true} --served-model-name intfloat/e5-small'): {
        "pooling/openai_embedding_client.py": "",
        "pooling/openai_embedding_matryoshka_fy.py": "",
        "pooling/embedding_requests_base64_client.py": "",
        "pooling/embedding_requests_bytes_client.py": "",
    },
    ("BAAI/bge-reranker-v2-m3", "--served-model-name BAAI/bge-reranker-v2-m3 BAAI/bge-reranker-base"): {
        "pooling/cohere_rerank_client.py": "",
        "pooling/jinaai_rerank_client.py": "",
        "pooling/openai_cross_encoder_score.py": "",
    },
    ("jason9693/Qwen2.5-1.5B-apeach", "--runner pooling --served-model-name jason9693/Qwen2.5-1.5B-apeach"): {
        "pooling/openai_classification_client.py": "",
    },
    ("boltuix/NeuroBERT-NER", "--runner pooling --served-model-name boltuix/NeuroBERT-NER"): {
        "pooling/ner_client.py": "",
    },
}
# Their own calls of `apply_chat_template` want the tokens alone, as transformers 4 gives them.
OLDER = ("prompt_embed_inference_with_openai_client.py", "token_generation_client.py")
URL = "http://127.0.0.1:8000/health"
START_S = 120
LIMIT_S = 240


@contextmanager
def serving(made: Stage, model: str, flags: str) -> Iterator[None]:
    """A server on port 8000 until the end."""
    folder = _folder(made, model)
    log = (made.folder / "server.log").open("w", encoding="utf-8")
    process = subprocess.Popen(
        [sys.executable, "-m", "beheld.cli.main", "serve", str(folder), *flags.split()],
        env=os.environ | made.environment(),
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
    try:
        until = time.monotonic() + START_S
        while not _answers():
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError((made.folder / "server.log").read_text(encoding="utf-8")[-2000:])
            time.sleep(0.5)
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        log.close()


def _folder(made: Stage, model: str) -> Path:
    """The checkpoint: of a repository, of a model that calls a function, of one that knows Italian, or a tiny one."""
    if example_repositories.known(model):
        return example_repositories.lay(made.hub, model)
    folder = made.folder / model
    if model not in ("calls", "whisper"):
        return tiny.checkpoint(model)
    if not folder.is_dir():
        folder.mkdir()
        if model == "calls":
            scripted.write(folder, scripted.CALL)
            return folder
        for file in tiny.checkpoint(model).iterdir():
            if file.suffix == ".json":
                (folder / file.name).write_text(file.read_text(encoding="utf-8").replace("<|tr|>", "<|it|>"))
            else:
                shutil.copy(file, folder)
    return folder


def _answers() -> bool:
    try:
        with urllib.request.urlopen(URL, timeout=2):
            return True
    except (urllib.error.URLError, OSError):
        return False


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", action="append", help="clients whose name holds this text")
    parser.add_argument("--stage", type=Path, help="where checkpoints and media are laid; kept for the next time")
    parser.add_argument("--python", help="a Python with transformers 4, for the clients that need it")
    arguments = parser.parse_args()
    made = examples.stage(arguments.stage or Path(tempfile.mkdtemp(prefix="beheld-clients-")))
    counts: Counter[str] = Counter()
    for (model, flags), clients in SERVERS.items():
        wanted = [name for name in clients if not arguments.only or any(text in name for text in arguments.only)]
        if not wanted:
            continue
        with serving(made, model, flags):
            for name in wanted:
                python = arguments.python if name in OLDER else None
                row = examples.run(made, arguments.folder / name, name, clients[name], limit_s=LIMIT_S, python=python)
                counts[row.result] += 1
                print(f"{row.result:8}{row.seconds:6.1f} s  {name:56}  {row.line[:260]}", flush=True)
    print(", ".join(f"{count} {result}" for result, count in counts.most_common()), "of", counts.total())


if __name__ == "__main__":
    main()
