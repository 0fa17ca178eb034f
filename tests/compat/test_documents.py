"""The documents' scripts, unmodified: every model key answers.

The scripts are not part of this repository; test_scripts.py has ones of our own that use the same names.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import Any

import pytest

from beheld.compat.assets import ImageAsset
from beheld.compat.media import fetch_image
from beheld.platform.cpu import Cpu
from tests import ranks
from tests.compat import documents, example_repositories, laid
from tests.compat.stage import Stage, check
from tests.long import LONG

# Keys whose prompts transformers' processors make otherwise: Mantis, Molmo, Phi-3, Phi-4 and the families around
# InternViT have processors of their own in their repositories, and of Florence-2 the encoder reads the prompt.
OWN_PROCESSOR = ("florence2", "mantis", "molmo", "phi3_v", "phi4_mm", "h2ovl_chat", "internvl_chat", "NVLM_D")
OWN_PROCESSOR += ("minicpmo", "minicpmv", "deepseek_vl_v2", "qwen_vl", "qwen_vl_chat", "glm4v")
# What the script of document 003 tells the processors.
PROCESSOR_OPTIONS: dict[str, dict[str, Any]] = {
    "gemma3": {"do_pan_and_scan": True},
    "idefics3": {"size": {"longest_edge": 3 * 364}},
}
PUBLIC_VIDEO_KEYS = ("ernie45_vl", "glm4_1v", "glm4_5v", "glm4_5v_fp8", "hyperclovax_seed_vision", "interns1")
# Document, key, the ranks that its script asks for, and how many answers it prints.
SHARED = [("000", "pixtral_hf", 2, 1)]
if LONG:
    SHARED += [("000", "NVLM_D", 4, 1), ("003", "NVLM_D", 4, 4)]
    shared = ("command_a_vision", "glm4_5v", "glm4_5v_fp8")
    SHARED += [("002", key, 4, 4) for key in documents.keys("002") if key in shared]
VIDEO_KEYS = ("llava-next-video", "llava-onevision", "minicpmo", "minicpmv", "qwen2_vl", "qwen2_5_vl")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Stage:
    stage = Stage(tmp_path_factory.mktemp("stage"))
    for number in ("000", "001"):
        laid.pictures(stage.copies, documents.urls(number))
    laid.assets(stage.assets)
    return stage


@pytest.fixture
def stage(place: Stage, monkeypatch: pytest.MonkeyPatch) -> Stage:
    place.enter(monkeypatch)
    return place


def set_up(stage: Stage, number: str, key: str) -> None:
    """Lay the key's repository, with code of its tokenizer where the script runs that."""
    name = documents.repository_of(number, key)
    if name in example_repositories.REPOSITORIES:
        example_repositories.lay(stage.hub, name)
    else:
        laid.lay_or_skip(stage.hub, name)


@pytest.mark.parametrize("method", ["generate", "chat"])
@pytest.mark.parametrize("key", documents.keys("000"))
def test_multi_image_script(stage: Stage, capsys: pytest.CaptureFixture[str], key: str, method: str) -> None:
    set_up(stage, "000", key)
    status = stage.run(documents.script("000"), "-m", key, "--method", method)
    shown = capsys.readouterr()
    assert status == 0
    check(stage.outputs[0], shown.out, count=1, media=2)
    if method == "generate" and key not in OWN_PROCESSOR:
        pictures = [fetch_image(url) for url in documents.urls("000")]
        options = {"size": {"longest_edge": 2 * 364}} if key == "idefics3" else {}
        (output,) = stage.outputs[0]
        assert output.prompt_token_ids == processed("000", key, str(output.prompt), pictures, options)


def processed(number: str, key: str, prompt: str, pictures: list[Any], options: dict[str, Any]) -> list[int]:
    """The token ids that transformers' own processor makes of a prompt with pictures."""
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(documents.repository_of(number, key))
    outputs = processor(text=[prompt], images=[pictures], return_tensors="pt", **options)
    ids: list[int] = outputs["input_ids"][0].tolist()
    return ids


@pytest.mark.parametrize("method", ["generate", "chat"])
@pytest.mark.parametrize("key", documents.keys("001"))
def test_notebook(stage: Stage, capsys: pytest.CaptureFixture[str], key: str, method: str) -> None:
    set_up(stage, "001", key)
    cells = documents.script("001").split('main("generate", "aria"')[0]
    status = stage.run(cells + f'main("{method}", "{key}", None, QUESTION, IMAGE_URLS)\n')
    shown = capsys.readouterr()
    assert status == 0
    check(stage.outputs[0], shown.out, count=1, media=12)


@pytest.mark.parametrize("key", [key for key in documents.keys("003") if key != "llava-next-video"])
def test_single_image_script(stage: Stage, capsys: pytest.CaptureFixture[str], key: str) -> None:
    set_up(stage, "003", key)
    status = stage.run(documents.script("003"), "--model-type", key, "--seed", "7")
    shown = capsys.readouterr()
    assert status == 0
    check(stage.outputs[0], shown.out, count=4, media=1)
    if key not in OWN_PROCESSOR:
        picture = ImageAsset("cherry_blossom").pil_image.convert("RGB")
        output = stage.outputs[0][0]
        assert output.prompt_token_ids == processed(
            "003", key, str(output.prompt), [picture], PROCESSOR_OPTIONS.get(key, {})
        )


@pytest.mark.parametrize("key", [key for key in documents.keys("003") if key in VIDEO_KEYS])
def test_video_script(stage: Stage, capsys: pytest.CaptureFixture[str], key: str) -> None:
    assert set_up(stage, "003", key) is None
    words = ["--model_type", key, "--modality", "video", "--num_frames=6", "--num-prompts", "1", "--time-generate"]
    status = stage.run(documents.script("003"), *words)
    shown = capsys.readouterr()
    assert status == 0
    assert "-- generate time = " in shown.out
    check(stage.outputs[0], shown.out, count=1, media=1)
    assert stage.outputs[0][0].media[0].given["frames"] == 6


@pytest.mark.parametrize(("number", "key", "count", "answers"), SHARED)
def test_as_many_ranks_as_the_script_says(
    stage: Stage,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    number: str,
    key: str,
    count: int,
    answers: int,
) -> None:
    """Where there are as many devices as its `tensor_parallel_size`, so many processes share the model."""
    set_up(stage, number, key)
    monkeypatch.setattr(Cpu, "splits", True)
    monkeypatch.setattr(Cpu, "num_devices", 4)
    words = ["--num-prompts", "4"] if number == "002" else []
    with ranks.forked():
        status = stage.run(documents.script(number), "-m", key, *words)
    shown = capsys.readouterr()
    assert status == 0
    assert any(line.startswith(f"{count} ranks share the model; each holds a part of") for line in stage.said)
    check(stage.outputs[0], shown.out, count=answers, media=2 if number == "000" else 1)


# A machine with four devices, each of them a process on the cores of this one.
FOUR_DEVICES = """
import sys
from beheld.cli.main import main
from beheld.platform.cpu import Cpu
Cpu.splits, Cpu.num_devices = True, 4
sys.exit(main(["run-vllm", *sys.argv[1:]]))
"""


@pytest.mark.parametrize(("number", "key", "count", "answers"), SHARED)
def test_ranks_of_a_script_in_a_process_of_its_own_end_with_it(
    place: Stage, number: str, key: str, count: int, answers: int
) -> None:
    """Scripts close no engine: the interpreter's end does. Nothing else is printed then, and nothing is left."""
    set_up(place, number, key)
    path = place.folder / f"ranks_{number}.py"
    path.write_text(documents.script(number), encoding="utf-8")
    words = ["--num-prompts", "4"] if number == "002" else []
    done = subprocess.run(
        [sys.executable, "-c", FOUR_DEVICES, str(path), "-m", key, *words],
        env=os.environ | place.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"{count} ranks share the model" in done.stderr
    assert len([line for line in done.stdout.splitlines() if line.strip()]) >= answers
    expected = ("INFO ", "Adding requests", "Processed prompts")
    others = [line for line in re.split(r"[\r\n]+", done.stderr) if line.strip() and not line.startswith(expected)]
    assert all(line.startswith(("WARNING ", "[transformers] ")) for line in others), others
    # Once, not by each rank.
    said = [line.split("] ", 1)[1] for line in others]
    assert len(said) == len(set(said)), said


@pytest.mark.skipif(not documents.keys("002"), reason="BEHELD_VLLM_EXAMPLES names no folder of vLLM's examples")
def test_document_002_is_the_start_of_the_public_script() -> None:
    """But for what its copy lost: line breaks, and what stood between < and >."""
    document, public = documents.remaining(documents.raw("002")), documents.remaining(documents.script("002"))
    assert len(document) > 12_000
    assert public.startswith(document.rstrip('"'))
    assert len(documents.keys("002")) == 22


@pytest.mark.parametrize("key", documents.keys("002"))
def test_cut_off_script_in_its_public_form(stage: Stage, capsys: pytest.CaptureFixture[str], key: str) -> None:
    set_up(stage, "002", key)
    # deepseek_ocr has parameters for each of the script's four questions, and so wants as many prompts.
    status = stage.run(documents.script("002"), "--model-type", key, "--num-prompts", "4")
    shown = capsys.readouterr()
    assert status == 0
    check(stage.outputs[0], shown.out, count=4, media=1)


@pytest.mark.parametrize("key", [key for key in documents.keys("002") if key in PUBLIC_VIDEO_KEYS])
def test_videos_of_the_cut_off_script(stage: Stage, capsys: pytest.CaptureFixture[str], key: str) -> None:
    set_up(stage, "002", key)
    words = ["-m", key, "--modality", "video", "--num-frames", "4", "--num-prompts", "1"]
    status = stage.run(documents.script("002"), *words)
    shown = capsys.readouterr()
    assert status == 0
    check(stage.outputs[0], shown.out, count=1, media=1)


def test_pictures_repeat_or_differ_as_the_script_says(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    set_up(stage, "003", "llava")
    words = ["-m", "llava", "--num-prompts", "6", "--use-different-prompt-per-request"]
    assert stage.run(documents.script("003"), *words, "--image-repeat-prob", "1") == 0
    assert stage.run(documents.script("003"), *words, "--image-repeat-prob", "0") == 0
    assert stage.run(documents.script("003"), *words, "--disable-mm-preprocessor-cache") == 0
    repeated, changed, uncached = ([output.media[0] for output in call] for call in stage.outputs)
    assert [receipt.cached for receipt in repeated] == [False] + [True] * 5
    assert not any(receipt.cached for receipt in (*changed, *uncached))
    assert len({receipt.digest for receipt in changed}) == 6
    assert len({receipt.digest for receipt in (*repeated, *uncached)}) == 1
    assert len({output.prompt for output in stage.outputs[0]}) == 4


@pytest.mark.parametrize(
    ("number", "words", "answers"),
    [("000", [], 1), ("000", ["-m", "qwen2_vl"], 1), ("001", [], 2), ("003", ["--num-prompts", "2"], 2)],
    ids=["000", "000-qwen2_vl", "001", "003"],
)
def test_in_a_process_of_their_own(place: Stage, number: str, words: list[str], answers: int) -> None:
    set_up(place, number, words[1] if "-m" in words else {"000": "phi3_v", "001": "aria", "003": "llava"}[number])
    path = place.folder / f"script_{number}.py"
    path.write_text(documents.script(number), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "beheld.cli.main", "run-vllm", str(path), *words],
        env=os.environ | place.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert done.stderr.count("Processed prompts: 100%") >= 1
    assert done.stderr.count("Adding requests") >= 1
    for line in ("Using max model len", "init engine", "KV cache size"):
        assert line in done.stderr
    assert len([line for line in done.stdout.splitlines() if line.strip()]) >= answers
