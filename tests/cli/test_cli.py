"""The command line: only the answer on standard output, errors in one line that says what to do."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw

from beheld.cli.backends import AnswerStats
from beheld.cli.chat import ChatSession
from beheld.cli.main import build_parser, main
from beheld.cli.media import check_question, references
from beheld.core.config import EngineArgs
from beheld.engine.setup import resolve_and_decide
from beheld.families import registry
from beheld.models.load import weigh
from beheld.mote import NOTHING, UNKNOWN
from beheld.platform import registry as platforms
from beheld.platform.cuda import Cuda
from beheld.platform.platform import Needs
from beheld.tools import doctor, fits
from beheld.tools.fits import weights_bytes
from benchmarks.shapes import checkpoint
from tests import tiny

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def picture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("media") / "p.png"
    tiny.pictures(1, 0)[0].save(path)
    return path


@pytest.fixture(scope="module")
def model() -> list[str]:
    return ["--model", str(tiny.checkpoint("qwen2_vl")), "--dtype", "float32", "--max-model-len", "512"]


def run(capsys: Capture, *words: Any) -> tuple[int, str, str]:
    status = main([str(word) for word in words])
    shown = capsys.readouterr()
    return status, shown.out, shown.err


def test_without_a_command_all_are_shown(capsys: Capture) -> None:
    status, out, notes = run(capsys)
    assert (status, out) == (2, "")
    assert {"ask", "serve", "doctor"} <= set(notes.split())
    done = subprocess.run([sys.executable, "-m", "beheld"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr.split()) == (2, "", notes.split())


def test_only_the_answer_is_on_standard_output(capsys: Capture, picture: Path, model: list[str]) -> None:
    status, plain, _ = run(capsys, "ask", picture, "What is this?", "--max-tokens", 6, *model)
    assert status == 0
    status, text, _ = run(capsys, "ask", picture, "What is this?", "--max-tokens", 6, "--json", *model)
    said = json.loads(text)
    assert plain == said["answer"] + "\n"
    assert said["usage"]["completion_tokens"] == 6
    assert said["media"][0]["given"]["format"] == "PNG"
    status, streamed, notes = run(capsys, "ask", picture, "What is this?", "--max-tokens", 6, "--stream", *model)
    assert streamed == plain
    assert "cut at --max-tokens" in notes


def test_receipts_go_to_standard_error(capsys: Capture, picture: Path, model: list[str]) -> None:
    _, _, notes = run(capsys, "ask", picture, picture, "Compare.", "--max-tokens", 2, "--receipts", *model)
    receipts = [json.loads(line) for line in notes.splitlines() if line.startswith("{")]
    assert [receipt["index"] for receipt in receipts] == [0, 1]
    assert receipts[0]["digest"] == receipts[1]["digest"]


def test_standard_input(capsys: Capture, picture: Path, model: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    class Stdin:
        buffer = io.BytesIO(picture.read_bytes())

    _, expected, _ = run(capsys, "ask", picture, "What?", "--max-tokens", 4, *model)
    monkeypatch.setattr("sys.stdin", Stdin)
    status, answer, _ = run(capsys, "ask", "-", "What?", "--max-tokens", 4, *model)
    assert (status, answer) == (0, expected)


def test_an_image_in_the_container_of_videos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for brand, modality in ((b"avif", "image"), (b"heic", "image"), (b"isom", "video")):

        class Stdin:
            buffer = io.BytesIO(b"\0\0\0\x20ftyp" + brand + bytes(64))

        monkeypatch.setattr("sys.stdin", Stdin)
        (ref,) = references(["-"])
        assert ref.modality == modality


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no full device")
@pytest.mark.parametrize("words", [["models"], ["ask", "examples/scene.png", "What?"]])
def test_a_full_device_is_one_line(words: list[str]) -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        done = subprocess.run(
            [sys.executable, "-m", "beheld", *words], stdout=full, stderr=subprocess.PIPE, text=True, check=False,
            cwd=Path(__file__).parents[2], timeout=120,
        )  # fmt: skip
    said = "beheld: Cannot write: No space left on device. Make room, or write elsewhere.\n"
    assert (done.returncode, done.stderr) == (1, said)


def test_a_full_device_behind_an_open_file_is_not_standard_output(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("beheld.cli.main._run", full)
    monkeypatch.setattr("beheld.utils.standard_streams.discard_output", lambda: None)
    said = "beheld: Cannot write: No space left on device. Make room, or write elsewhere.\n"
    assert run(capsys, "models") == (1, "", said)


def test_an_interruption_before_the_command_is_one_line(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("beheld.cli.main.build_parser", interrupted)
    assert run(capsys, "models") == (130, "", "beheld: interrupted\n")


def test_a_place_in_a_file_of_options(capsys: Capture, tmp_path: Path) -> None:
    (tmp_path / "serve.yaml").write_text("port: 8001\nmodel: [mote\n")
    status, _, err = run(capsys, "serve", "--config", tmp_path / "serve.yaml")
    assert status == 1
    assert "cannot be read as YAML (line 3, column 1)" in err


def test_only_ask_speaks_of_its_question(capsys: Capture) -> None:
    assert run(capsys, "plan", "mote", "missing.png")[2] == "beheld: There is no file 'missing.png'. Check the name.\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["missing.png", "What?"], "no file 'missing.png'"),
        (["examples", "What?"], "'examples' is a folder, not a file."),
        (["examples/scene.png"], "There is no question: the last argument, 'examples/scene.png', is a file."),
        (["-", "-", "What?"], "only once"),
        (["What?", "--model", "/nowhere/at/all"], "no folder"),
        (["What?", "--max-tokens", "0"], "max_tokens"),
        (["What?", "--pipeline-parallel-size", "0"], "pipeline_parallel_size must be"),
    ],
)
def test_errors_are_one_line_that_says_what_to_do(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    status, out, err = run(capsys, "ask", *words)
    assert status == 1
    assert out == ""
    last = err.strip().splitlines()[-1]
    assert last.startswith("beheld: ")
    assert message in last


def test_a_question_may_be_longer_than_a_files_name() -> None:
    check_question("What differs between this and " + "x" * 300 + ".jpg")


def test_what_is_not_a_picture(capsys: Capture, model: list[str], tmp_path: Path) -> None:
    path = tmp_path / "notes.png"
    path.write_text("not a picture")
    status, out, err = run(capsys, "ask", path, "What?", *model)
    assert (status, out) == (1, "")
    assert "image 1" in err.strip().splitlines()[-1]


def test_plan_needs_no_weights(capsys: Capture, picture: Path, tmp_path: Path) -> None:
    for file in tiny.checkpoint("qwen2_vl").iterdir():
        if "safetensors" not in file.name:
            (tmp_path / file.name).write_bytes(file.read_bytes())
    status, text, _ = run(capsys, "plan", tmp_path, picture, picture, "--json")
    made = json.loads(text)
    assert status == 0
    assert made["media_tokens"] == sum(item["tokens"] for item in made["media"]) > 0
    assert made["model"]["weights_bytes"] > 0
    status, text, _ = run(capsys, "plan", tmp_path, picture)
    assert "KV cache" in text
    assert f"{made['media'][0]['tokens']} tokens" in text


def test_plan_counts_keys_and_values_in_fewer_bits(capsys: Capture) -> None:
    sizes = []
    for kind in ("float32", "fp8"):
        status, text, _ = run(capsys, "plan", tiny.checkpoint("llama"), "--json", "--kv-cache-dtype", kind)
        assert status == 0
        sizes.append(json.loads(text)["model"]["kv_bytes_per_token"])
    assert sizes[0] == 4 * sizes[1]
    status, _, told = run(capsys, "plan", tiny.checkpoint("llama"), "--kv-cache-dtype", "int3")
    assert status == 1
    assert "kv_cache_dtype='int3'" in told


def test_plan_counts_weights_of_another_type(capsys: Capture) -> None:
    sizes = {}
    for dtype in ("float32", "bfloat16"):
        status, text, _ = run(capsys, "plan", tiny.checkpoint("llama"), "--json", "--dtype", dtype)
        assert status == 0
        sizes[dtype] = json.loads(text)["model"]["weights_bytes"]
    assert sizes["float32"] == 2 * sizes["bfloat16"]
    status, _, told = run(capsys, "plan", tiny.checkpoint("llama"), "--dtype", "float3")
    assert status == 1
    assert "dtype 'float3'" in told


def test_plan_counts_weights_that_are_rounded_at_load(capsys: Capture) -> None:
    sizes = {}
    for kind in ("", "fp8", "nf4"):
        given = ["--quantization", kind] if kind else []
        status, text, _ = run(capsys, "plan", tiny.checkpoint("llama"), "--json", *given)
        assert status == 0
        sizes[kind] = json.loads(text)["model"]["weights_bytes"]
    assert sizes["nf4"] < sizes["fp8"] < sizes[""]
    status, _, told = run(capsys, "plan", tiny.checkpoint("llama"), "--quantization", "int3")
    assert status == 1
    assert "quantization='int3'" in told


def test_plan_counts_the_state_of_recurrent_layers(capsys: Capture) -> None:
    """Three layers of four heads, 16 times 12 numbers in float32, and three positions of 112 channels in bfloat16."""
    status, text, _ = run(capsys, "plan", tiny.checkpoint("qwen3_next"), "--json")
    assert status == 0
    made = json.loads(text)["model"]
    element = {"float32": 4, "bfloat16": 2}[made["dtype"]]
    assert made["state_bytes_per_sequence"] == 3 * (4 * 16 * 12 * 4 + 3 * (2 * 2 * 16 + 4 * 12) * element)
    _, text, _ = run(capsys, "plan", tiny.checkpoint("qwen3_next"))
    assert "MiB a sequence" in text
    _, text, _ = run(capsys, "plan", tiny.checkpoint("llama"))
    assert "a sequence" not in text


def test_doctor(capsys: Capture) -> None:
    status, text, _ = run(capsys, "doctor", "--json")
    report = json.loads(text)
    assert status == 0
    assert report["ok"]
    assert report["libraries"]["torch"] != "not installed"
    assert report["decisions"]["device"] in ("cpu", "cuda")
    status, text, _ = run(capsys, "doctor")
    assert "everything needed is there" in text


@pytest.mark.parametrize(
    ("triton", "hopper", "said"),
    [(True, True, "a kernel for Hopper"), (True, False, "as for others: their kernel"), (False, True, "not installed")],
)
def test_doctor_says_what_computes_long_prompts(
    triton: bool, hopper: bool, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = SimpleNamespace(
        has_triton=triton,
        device="cuda",
        needs=Cuda.needs,
        kernel_facts=lambda device: SimpleNamespace(warpgroup_products=hopper),
    )
    monkeypatch.setattr(platforms, "accelerator", lambda: found)
    assert said in doctor._long_prompts()["attention of long prompts"]
    found.needs = Needs()
    assert doctor._long_prompts() == {}, "no kernel is made for this platform"
    monkeypatch.setattr(platforms, "accelerator", lambda: None)
    assert doctor._long_prompts() == {}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "required"),
        (["What?", "--no-such-flag"], "--no-such-flag"),
        (["What?", "--limit-mm-per-prompt", "two"], "must be JSON"),
        (["What?", "--max-num-seqs", "many"], "must be a whole number"),
    ],
)
def test_wrong_usage(capsys: Capture, words: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["ask", *words])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_a_process_of_its_own_says_nothing_but_the_answer(picture: Path, model: list[str]) -> None:
    command = [sys.executable, "-m", "beheld.cli.main", "ask", str(picture), "What?", "--temperature", "0", *model]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip()
    assert [line for line in done.stderr.splitlines() if not line.startswith("note: ")] == []


def test_nothing_is_complained_of_at_the_end(model: list[str]) -> None:
    """Of a script, whose process takes the libraries down."""
    script = f"from beheld import LLM\nprint(LLM({model[1]!r}).generate('What is this?', use_tqdm=False)[0].outputs[0])"
    environment = {**os.environ, "BEHELD_LOG_LEVEL": "WARNING"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.startswith("CompletionOutput")
    assert "leak" not in done.stderr
    assert len(done.stderr.splitlines()) <= 3, done.stderr


# A thread that nobody ends keeps an interpreter from being taken down.
_ENDING = """
import atexit, sys, threading
from beheld.cli import main
threading.Thread(target=threading.Event().wait).start()
atexit.register(print, "exit handlers ran")
sys.argv = ["beheld", "ask"]
main.main = lambda: print("the answer") or 3
main.command()
"""


def test_a_command_that_has_closed_everything_ends_at_once() -> None:
    done = subprocess.run([sys.executable, "-c", _ENDING], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (3, "the answer\nexit handlers ran\n", "")


def test_a_reader_that_went_away_is_not_complained_of() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    # What is kept back until the end is written there for the first time.
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-c", _ENDING]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60, env=buffered)
    os.close(writer)
    assert (done.returncode, done.stderr) == (3, "")


def test_json_and_stream_exclude_each_other(capsys: Capture, picture: Path) -> None:
    with pytest.raises(SystemExit):
        run(capsys, "ask", picture, "What?", "--json", "--stream")
    assert "not allowed with" in capsys.readouterr().err


@pytest.mark.case(107)
def test_a_working_directory_that_was_deleted_is_left(tmp_path: Path) -> None:
    """A library ended the process as it was loaded: it asks where it is."""
    gone = tmp_path / "gone"
    gone.mkdir()
    command = f"cd {gone} && rmdir {gone} && exec {sys.executable} -m beheld ask Hello"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_short_names_that_fit(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    from beheld.platform.cpu import Cpu

    def rows(*words: str) -> dict[str, list[str]]:
        _, text, _ = run(capsys, "models", *words)
        return {line.split()[0]: line.split() for line in text.splitlines()[2:-1]}

    every = rows("--short")
    assert set(every) == set(registry.short_names())
    monkeypatch.setattr(Cpu, "memory", lambda self: (6 << 30, 8 << 30))
    fitting = rows("--fits")
    short = registry.short_names()
    assert {name for name in short if short[name].billions < 1.2} <= set(fitting)
    assert not {name for name in fitting if short[name].billions > 10}
    assert all(float(fitting[name][1]) <= 6 for name in fitting)


@pytest.mark.parametrize("size", ["3B", "7B"])
def test_bytes_of_rounded_weights_are_near_the_engines_count(size: str, tmp_path: Path) -> None:
    """Embeddings and towers, which keep their type, are a fifth to three quarters of a model's bytes."""
    folder = checkpoint(size, tmp_path)
    for dtype, width in (("float32", 4.0), ("bfloat16", 2.0)):
        for quantization in (None, "int8", "int4"):
            args = EngineArgs(str(folder), device="cpu", dtype=dtype, quantization=quantization, load_format="dummy")
            decided = resolve_and_decide(args)
            counted = weigh(decided.hf_config, decided.info, decided.config)
            estimated = weights_bytes(counted.num_parameters / 1e9, width, quantization)
            assert estimated == pytest.approx(counted.num_bytes, rel=0.1), (dtype, quantization)


@pytest.mark.parametrize(("size", "experts"), [("3B", 0.0), ("7B", 0.0), ("30B-A3B", 29.0)])
def test_bytes_of_weights_rounded_on_a_gpu_are_near_the_engines_count(
    size: str, experts: float, tmp_path: Path
) -> None:
    """The head keeps its type, too; with int4 experts as well."""
    folder = checkpoint(size, tmp_path)
    args = EngineArgs(str(folder), device="cpu", dtype="bfloat16", load_format="dummy")
    decided = resolve_and_decide(args)
    for quantization in ("fp8", "int8", "int4"):
        config = replace(decided.config, device="cuda", quantization=quantization)
        counted = weigh(decided.hf_config, decided.info, config)
        billions = counted.num_parameters / 1e9
        estimated = weights_bytes(billions, 2.0, quantization, experts=experts, on_gpu=True)
        assert estimated == pytest.approx(counted.num_bytes, rel=0.1), quantization


def test_a_gpu_fits_what_it_can_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """7B in bfloat16 do not fit 16 GiB; 32B fit 32 in four bits alone, and what has experts not even so."""
    from beheld.platform.cuda import Cuda

    monkeypatch.setattr(Cuda, "fp8_products", True)
    monkeypatch.setattr(Cuda, "no_grouped_products", None)
    gpu = platforms.platform_of("cuda")
    monkeypatch.setattr(gpu, "has_triton", True)
    monkeypatch.setattr(fits, "choose", lambda wanted: gpu)

    def ways(gib: int) -> dict[str, str | None]:
        monkeypatch.setattr(Cuda, "memory", lambda self: (gib << 30, gib << 30))
        return {each.short.name: each.quantization for each in fits.fits() if each.fits}

    small, large = ways(16), ways(32)
    assert (small["qwen2.5-vl-3b"], small["qwen2.5-vl-7b"]) == (None, "fp8")
    assert (large["qwen2.5-vl-7b"], large["qwen2.5-vl-32b"]) == (None, "int4")
    assert "qwen3-vl-30b-a3b" not in large
    assert ways(48)["qwen3-vl-30b-a3b"] == "fp8"
    # Without Triton and FP8, all have to fit as they are.
    monkeypatch.setattr(Cuda, "no_grouped_products", "Triton is not installed")
    monkeypatch.setattr(Cuda, "fp8_products", False)
    assert set(ways(24).values()) == {None}


def test_a_plan_for_gpus_counts_their_form(capsys: Capture) -> None:
    """With int4 a GPU leaves the head as it is, and experts; a CPU rounds them."""
    sizes = []
    for given in ([], ["--gpus", "1x24GiB"]):
        options = ["--quantization", "int4", "--dtype", "bfloat16", *given]
        _, text, _ = run(capsys, "plan", tiny.checkpoint("qwen3_vl_moe"), "--json", *options)
        sizes.append(json.loads(text)["model"]["weights_bytes"])
    assert sizes[1] > 1.2 * sizes[0]


def test_a_gif_of_several_frames_is_a_video(capsys: Capture, tmp_path: Path) -> None:
    frames = [Image.new("RGB", (320, 240), "white") for _ in range(8)]
    for at, frame in enumerate(frames):
        ImageDraw.Draw(frame).rectangle((10 + 30 * at, 90, 60 + 30 * at, 140), fill=(20, 20, 220))
    frames[0].save(tmp_path / "moves.gif", save_all=True, append_images=frames[1:], duration=120)
    _, said, _ = run(capsys, "ask", tmp_path / "moves.gif", "Describe this video.", "--json")
    answer = json.loads(said)
    assert answer["media"][0]["used"]["frames"] == 8
    assert "moves to the right" in answer["answer"]
    frames[0].save(tmp_path / "stands.gif")
    _, said, _ = run(capsys, "ask", tmp_path / "stands.gif", "What is this?", "--json")
    assert [item["item"] for item in json.loads(said)["media"]] == ["image 1"]


def test_what_many_pages_lost_is_one_note(capsys: Capture, tmp_path: Path) -> None:
    pages = [Image.new("RGB", (595, 842), "white") for _ in range(6)]
    pages[0].save(tmp_path / "pages.pdf", save_all=True, append_images=pages[1:])
    _, _, notes = run(capsys, "ask", tmp_path / "pages.pdf", "What does it say?")
    assert [line for line in notes.splitlines() if "fine detail" in line] == [
        "note: image 1 and 5 more: it was shrunk 5.0 times and lost fine detail"
    ]


def test_a_served_model_is_named_as_where_it_is_asked() -> None:
    for command, words in (("ask", ["picture.png", "What?"]), ("chat", []), ("serve", [])):
        assert build_parser().parse_args([command, "-m", "smolvlm-256m", *words]).model == "smolvlm-256m"


def test_verify_shows_no_bars_of_transformers(capsys: Capture) -> None:
    scene = Path(__file__).parents[2] / "examples" / "scene.png"
    status, said, notes = run(capsys, "verify", "mote", scene)
    assert (status, notes) == (0, "")
    assert "No stage differs." in said


def test_the_embedded_model_names_another_one_where_it_knows_nothing(capsys: Capture, tmp_path: Path) -> None:
    noise = np.random.default_rng(1).integers(0, 256, (60, 80, 3), dtype=np.uint8)
    Image.fromarray(noise).resize((320, 240)).save(tmp_path / "noise.png")
    _, said, notes = run(capsys, "ask", tmp_path / "noise.png", "What is this?")
    assert said.strip() == UNKNOWN
    assert "For photographs: beheld ask -m" in notes
    # For which a smooth texture may pass.
    Image.new("RGB", (320, 240), "white").save(tmp_path / "empty.png")
    _, said, notes = run(capsys, "ask", tmp_path / "empty.png", "What is this?")
    assert said.strip() == NOTHING
    assert "For photographs: beheld ask -m" in notes
    scene = Path(__file__).parents[2] / "examples" / "scene.png"
    _, said, notes = run(capsys, "ask", scene, "What is this?")
    assert "red circle" in said
    assert "photographs" not in notes


def test_a_chat_names_another_model_below_the_answer_to_what_is_unknown(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Said:
        name = "a model"

        def part(self, ref: Any) -> dict[str, Any]:
            raise AssertionError("nothing is added")

        def answer(self, messages: list[dict[str, Any]], stats: AnswerStats) -> Iterator[str]:
            yield UNKNOWN if messages[-1]["content"][-1]["text"] == "What is this?" else "A red circle."

    monkeypatch.setattr("sys.stdin", io.StringIO("What is this?\n"))
    ChatSession(Said(), None).run([])  # type: ignore[arg-type]
    assert "note: For photographs: beheld chat -m" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", io.StringIO("And this?\n"))
    ChatSession(Said(), None).run([])  # type: ignore[arg-type]
    assert capsys.readouterr().err == ""
