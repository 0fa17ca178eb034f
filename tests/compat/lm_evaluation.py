"""Runs lm-evaluation-harness against `beheld serve` with mote, on two tiny tasks made here.

    python -m tests.compat.lm_evaluation [--lm-eval PROGRAM]

PROGRAM is the command lm_eval of an environment of its own (pip install "lm-eval[api]"). `shapes_text` scores given
answers through /v1/completions (echo, logprobs), and `shapes_image` asks about drawn shapes through
/v1/chat/completions. Prints the harness's own results; the exit status is 0 if both ran and mote's answers are nearly
all right.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import beheld.mote

COLOURS = ("red", "green", "blue", "yellow")
SHAPES = ("circle", "square", "triangle")
START_S = 180
# What mote reaches at least; a wrong image, template or log-probability brings it near to chance.
LEAST = 0.9

_TEXT = """task: shapes_text
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/text.jsonl}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc}}]
"""
_IMAGE = """task: shapes_image
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/image.jsonl}}}}
test_split: test
output_type: generate_until
doc_to_image: !function pictures.image
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 24}}
process_results: !function pictures.named
metric_list: [{{metric: acc}}]
"""
_PICTURES = '''from PIL import Image, ImageDraw


def image(doc):
    """A list of one picture."""
    made = Image.new("RGB", (224, 224), "white")
    draw, box = ImageDraw.Draw(made), (52, 52, 172, 172)
    if doc["shape"] == "circle":
        draw.ellipse(box, fill=doc["colour"])
    elif doc["shape"] == "square":
        draw.rectangle(box, fill=doc["colour"])
    else:
        draw.polygon([(112, 52), (172, 172), (52, 172)], fill=doc["colour"])
    return [made]


def named(doc, results):
    """1 if the answer names the colour."""
    return {"acc": float(doc["answer"] in results[0].lower())}
'''


def write_tasks(folder: Path) -> None:
    """Write both tasks and their documents."""
    folder.joinpath("shapes_text.yaml").write_text(_TEXT.format(folder=folder), encoding="utf-8")
    folder.joinpath("shapes_image.yaml").write_text(_IMAGE.format(folder=folder), encoding="utf-8")
    folder.joinpath("pictures.py").write_text(_PICTURES, encoding="utf-8")
    text = [
        {"question": f"The {colour} {shape} is", "choices": [f" {colour}.", " qzx#."], "answer": 0}
        for colour in COLOURS
        for shape in SHAPES
    ]
    image = [
        {"question": f"What colour is the {shape}?", "shape": shape, "colour": colour, "answer": colour}
        for colour in COLOURS
        for shape in SHAPES
    ]
    for name, lines in (("text", text), ("image", image)):
        folder.joinpath(f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def evaluate(program: str, folder: Path, kind: str, task: str, url: str, more: str, *flags: str) -> float:
    """Run one task of the harness; returns its accuracy.

    Raises:
        CalledProcessError: the harness failed.
    """
    results = folder / f"results-{task}"
    words = [program, "run", "--model", kind, "--tasks", task, "--include_path", str(folder), *flags]
    words += ["--model_args", f"model=mote,base_url={url},num_concurrent=4{more}", "--output_path", str(results)]
    subprocess.run(words, cwd=folder, env=os.environ | {"OPENAI_API_KEY": "EMPTY"}, check=True)
    (found,) = results.rglob("results_*.json")
    return float(json.loads(found.read_text(encoding="utf-8"))["results"][task]["acc,none"])


def main() -> int:
    """Run both; the exit status is 0 if mote's answers are nearly all right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lm-eval", default="lm_eval")
    program = parser.parse_args().lm_eval
    folder = Path(tempfile.mkdtemp(prefix="beheld-evaluation-"))
    write_tasks(folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    words = ["serve", "--port", str(port), "--served-model-name", "mote"]
    server = subprocess.Popen([sys.executable, "-m", "beheld.cli.main", *words], start_new_session=True)
    try:
        until = time.monotonic() + START_S
        while not _answers(url):
            if server.poll() is not None or time.monotonic() > until:
                raise RuntimeError("the server did not start")
            time.sleep(0.5)
        tokenizer = f",tokenizer={Path(beheld.mote.__file__).parent}"
        text = evaluate(program, folder, "local-completions", "shapes_text", f"{url}/v1/completions", tokenizer)
        chat = ("local-chat-completions", "shapes_image", f"{url}/v1/chat/completions", "", "--apply_chat_template")
        image = evaluate(program, folder, *chat)
        print(f"shapes_text {text:.2f}, shapes_image {image:.2f}; at least {LEAST} is expected", flush=True)
        return int(min(text, image) < LEAST)
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2):
            return True
    except (urllib.error.URLError, OSError):
        return False


if __name__ == "__main__":
    sys.exit(main())
