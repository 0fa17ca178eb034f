"""Every script of examples/ runs as a user runs it, on the embedded model or on a tiny checkpoint."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from beheld import mote
from tests import tiny
from tests.server.running import Running

FOLDER = Path(__file__).resolve().parents[2] / "examples"
SCENE = "A large red circle at the top left and a small blue square at the bottom right."
Run = Callable[..., str]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a script with these arguments; returns what it wrote on standard output."""

    def call(name: str, *arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out

    return call


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server of the embedded model."""
    running = Running(mote.path(), {"max_num_seqs": 4, "max_model_len": 2048, "disable_log_stats": True})
    yield running.url
    running.close()


def test_offline_image(run: Run) -> None:
    assert run("offline_image").startswith(SCENE)


def test_embeddings(run: Run) -> None:
    *sizes, first, second = run("embeddings").splitlines()
    assert [line.split(" for ")[0] for line in sizes] == ["256 numbers"] * 2
    assert -1 <= float(second.split()[0]) <= 1
    assert first.endswith("A red circle and a blue square.")


def test_document(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pypdfium2", reason="pip install pypdfium2")
    monkeypatch.chdir(tmp_path)
    both = run("document").splitlines()
    assert "A large green star in the middle." in both[0]
    assert both[-2:] == ["image 1: page 1 of 2", "image 2: page 2 of 2"]
    second, receipt = run("document", "--file", tmp_path / "drawings.pdf", "--pages", "2").splitlines()
    assert second.startswith("A medium yellow heart")
    assert receipt == "image 1: page 2 of 2"


def test_grounding(run: Run, tmp_path: Path) -> None:
    """Random weights point anywhere, and always within the image."""
    picture, to = tmp_path / "a.png", tmp_path / "boxes.png"
    tiny.picture(300, 200, 1).save(picture)
    lines = run("grounding", "--model", tiny.checkpoint("qwen2_5_vl"), "--image", picture, "--to", to).splitlines()
    assert lines
    for line in lines:
        label, box = line.split(" within ")[0].split(" ", 1)
        left, top, right, bottom = json.loads(f"[{box.strip('()')}]")
        assert label in ("circle", "square", "star", "triangle")
        assert 0 <= left <= right <= 300
        assert 0 <= top <= bottom <= 200
    assert to.is_file()


def test_many_images(run: Run) -> None:
    together, second, first, other = run("many_images").splitlines()
    assert together == "together: 1. A large green star in the middle."
    assert second.startswith("2. A medium yellow heart")
    assert first == "two_pictures_a.png: A large green star in the middle."
    assert other.startswith("two_pictures_b.png: A medium yellow heart")


def test_video(run: Run) -> None:
    out = run("video", "--frames", 8)
    assert out.startswith("An orange star moves to the right.")
    assert "8 frames, " in out
    assert "lost: 8 of 16 frames were not used" in out


def test_audio(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "sound.wav"
    file.write_bytes(tiny.wav(tiny.sound(1.5)))
    out = run("audio", "--model", tiny.checkpoint("qwen2_audio"), "--audio", file, "--max-tokens", 8)
    assert "'seconds': 1.5" in out
    assert "the same answer from samples: True" in out


def test_transcribe(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "sound.wav"
    file.write_bytes(tiny.wav(tiny.sound(3.5)))
    out = run("transcribe", "--model", tiny.checkpoint("whisper"), "--audio", file, "--max-tokens", 12)
    assert "the same in both forms: True" in out
    assert " to " in out


def test_batch_with_resumption(run: Run, tmp_path: Path) -> None:
    questions, answers = tmp_path / "questions.jsonl", tmp_path / "answers.jsonl"
    images = ["scene.png", "missing.png", "sign.png", "two_pictures_a.png"]
    rows = [{"id": i, "image": str(FOLDER / name), "question": "What is this?"} for i, name in enumerate(images)]
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run("batch_resume", questions, answers, "--stop-after", 2) == "0 questions were answered before\n"
    with answers.open("a") as file:
        file.write('{"id": 3, "ans')
    assert run("batch_resume", questions, answers) == "2 questions were answered before\n"
    found = {row["id"]: row for row in map(json.loads, answers.read_text().splitlines())}
    assert sorted(found) == [0, 1, 2, 3]
    assert found[0]["answer"].startswith(SCENE)
    assert "cannot be opened" in found[1]["error"]
    assert "OPEN 24/7" in found[2]["answer"]


def test_chat(run: Run) -> None:
    out = run("chat")
    assert SCENE in out
    assert "The square is blue." in out
    assert "(0 prompt tokens came from the cache)" not in out.splitlines()[-1]


def test_async_engine(run: Run) -> None:
    scene, sign = run("async_engine").splitlines()
    assert SCENE in scene
    assert "OPEN 24/7" in sign


def test_structured_output(run: Run) -> None:
    choice, regex, answer = run("structured_output").splitlines()
    assert choice == "choice: red"
    assert regex == "regex: There are two shapes"
    assert answer.startswith("json: {'shape': ")


def test_ocr_of_a_page(run: Run, tmp_path: Path) -> None:
    run("ocr_page", "--out", tmp_path / "page.json")
    lines = json.loads((tmp_path / "page.json").read_text())["lines"]
    for line, text in zip(lines, ("Invoice", "No 4711", "Total 90", "Thanks"), strict=True):
        assert text in line


def test_lora(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    from tests.lora import adapters

    folder = adapters.write(adapters.Adapter("llava", 5), tmp_path / "adapter")
    out = run("lora", "--model", tiny.checkpoint("llava"), "--adapter", folder, "--max-lora-rank", 8)
    plain, adapted = out.split("with the adapter: ")
    assert plain.removeprefix("the model itself: ").strip() != adapted.strip()


def test_embeddings_as_input(run: Run) -> None:
    number, embedded, shown = run("embeddings_input").splitlines()
    assert number == "204 embeddings of width 256"
    assert embedded.removeprefix("from embeddings: ") == shown.removeprefix("from the image:  ")
    assert SCENE in shown


def test_receipts(run: Run) -> None:
    out = run("receipts")
    assert "given 640 x 480\n  the model saw 340 x 240, 204 tokens" in out
    assert "lost: it was shrunk 10.0 times" in out
    assert "refused: image 1: strict_media is set" in out


def test_plan(run: Run) -> None:
    out = run("plan")
    assert out.startswith("scene.png: 204 tokens")
    assert out.endswith("708 tokens in all\n")


def test_errors(run: Run) -> None:
    first, second, third, fourth = run("errors").splitlines()
    assert first.startswith("answer: ")
    assert second.startswith("error: DecodeError in stage decode, image 1: ")
    assert third.startswith("error: FetchError in stage fetch, image 1: ")
    assert fourth.startswith("answer: ")


def test_logprobs(run: Run) -> None:
    out = run("logprobs")
    assert "' red'" in out
    assert out.splitlines()[-1].startswith("all of it: ")


def test_reproducible_sampling(run: Run) -> None:
    assert "the same tokens in a batch: True" in run("reproducible_sampling")


def test_openai_client(run: Run, url: str) -> None:
    out = run("openai_client", "--url", url)
    assert out.startswith(SCENE)
    assert "the model saw: {'width': 340, 'height': 240}" in out


def test_streaming_client(run: Run, url: str) -> None:
    out = run("streaming_client", "--url", url)
    assert out.startswith(SCENE)
    assert "tokens; the first came after " in out


def test_tools(run: Run, url: str) -> None:
    assert run("tools", "--url", url).startswith("find_part({'shape': ")


def test_benchmark(run: Run) -> None:
    out = run("benchmark", "--requests", 4, "--tokens", 4, "--side", 64)
    assert "output tokens/s" in out


def test_every_script_has_a_test_and_a_line_in_the_list() -> None:
    source = Path(__file__).read_text(encoding="utf-8")
    listed = (FOLDER / "README.md").read_text(encoding="utf-8")
    scripts = sorted(path.stem for path in FOLDER.glob("*.py"))
    assert len(scripts) >= 15
    for name in scripts:
        assert f'run("{name}"' in source, f"no test runs examples/{name}.py"
        assert f"`{name}.py`" in listed, f"examples/README.md does not list {name}.py"
