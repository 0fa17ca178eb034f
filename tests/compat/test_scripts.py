"""Scripts of our own that use vLLM's names as users do: proof where the documents' scripts are not at hand."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import ImageFont

from beheld import SamplingParams
from beheld.checkpoint.convert import converted
from beheld.checkpoint.files import read_json
from tests import tiny
from tests.compat import example_repositories, laid
from tests.compat.stage import Stage, check
from tests.long import LONG

SCRIPTS = Path(__file__).parent / "scripts"
URLS = ["https://host.test/a%20picture%20%28one%29.jpg", "http://host.test/deeper/two.jpg"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Stage:
    stage = Stage(tmp_path_factory.mktemp("stage"))
    laid.pictures(stage.copies, URLS)
    laid.assets(stage.assets)
    return stage


@pytest.fixture
def stage(place: Stage, monkeypatch: pytest.MonkeyPatch) -> Stage:
    place.enter(monkeypatch)
    return place


def script(name: str) -> str:
    return (SCRIPTS / f"{name}.py").read_text(encoding="utf-8")


@pytest.mark.parametrize("method", ["generate", "chat"])
@pytest.mark.parametrize(
    ("key", "name"), [("llava", "llava-hf/llava-1.5-7b-hf"), ("qwen2_vl", "Qwen/Qwen2-VL-7B-Instruct")]
)
def test_several_pictures(
    stage: Stage, capsys: pytest.CaptureFixture[str], key: str, name: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The package is not needed, and the script says so itself.
    monkeypatch.setitem(sys.modules, "qwen_vl_utils", None)
    laid.repository(stage.hub, name)
    assert stage.run(script("several_pictures"), "-m", key, "--method", method) == 0
    shown = capsys.readouterr()
    check(stage.outputs[0], shown.out, count=1, media=2)
    assert ("WARNING: `qwen-vl-utils`" in shown.out) == (key == "qwen2_vl")
    if key == "llava":
        assert any("tensor_parallel_size=2 has no effect on a CPU" in line for line in stage.said)


def test_an_adapter_from_the_repository(stage: Stage) -> None:
    pytest.importorskip("peft")
    from tests.lora import adapters

    folder = laid.repository(stage.hub, "llava-hf/llava-1.5-7b-hf")
    adapters.write(adapters.Adapter("llava", 5), folder / "vision-lora")
    for key in ("llava", "adapted"):
        assert stage.run(script("several_pictures"), "-m", key) == 0
    without, adapted = (call[0].outputs[0].token_ids for call in stage.outputs)
    assert without != adapted


@pytest.mark.parametrize(
    ("key", "name", "modality"),
    [
        ("deepseek_ocr", "deepseek-ai/DeepSeek-OCR", "image"),
        ("llava", "llava-hf/llava-1.5-7b-hf", "image"),
        ("idefics3", "HuggingFaceM4/Idefics3-8B-Llama3", "image"),
        ("qwen2_5_vl", "Qwen/Qwen2.5-VL-3B-Instruct", "image"),
        ("qwen2_5_vl", "Qwen/Qwen2.5-VL-3B-Instruct", "video"),
    ],
)
def test_one_item(stage: Stage, capsys: pytest.CaptureFixture[str], key: str, name: str, modality: str) -> None:
    laid.repository(stage.hub, name)
    words = ["--model_type", key, "--modality", modality, "--num_frames", "6", "--time-generate"]
    assert stage.run(script("one_item"), *words) == 0
    shown = capsys.readouterr()
    assert "-- generate time = " in shown.out
    check(stage.outputs[0], shown.out, count=4, media=1)
    receipts = [output.media[0] for output in stage.outputs[0]]
    assert [receipt.cached for receipt in receipts] == [False, True, True, True]
    if modality == "video":
        assert receipts[0].given["frames"] == 6


FURTHER = {
    "aya_vision": "CohereForAI/aya-vision-8b",
    "command_a_vision": "CohereLabs/command-a-vision-07-2025",
    "ernie45_vl": "baidu/ERNIE-4.5-VL-28B-A3B-PT",
    "gemma3n": "google/gemma-3n-E2B-it",
    "glm4_1v": "zai-org/GLM-4.1V-9B-Thinking",
    "glm4_5v": "zai-org/GLM-4.5V",
    "glm4_5v_fp8": "zai-org/GLM-4.5V-FP8",
    "hunyuan_vl": "tencent/HunyuanOCR",
}


def test_what_users_read_while_a_script_runs(
    stage: Stage, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("beheld.utils.log._said", set())
    laid.repository(stage.hub, "Qwen/Qwen2-VL-7B-Instruct")
    assert stage.run(script("several_pictures"), "-m", "qwen2_vl", "--method", "chat", "--seed", "5") == 0
    for start in (
        "This model supports the tasks: {'generate'}",
        "Automatically detected platform cpu",
        "Using max model len 2048",
        "Chunked prefill is enabled with max_num_batched_tokens=",
        "Encoder cache will be initialized with a budget of ",
        "Initializing an engine with config: model='Qwen/Qwen2-VL-7B-Instruct', ",
        "Loading weights took ",
        "Model loading took ",
        "Available KV cache memory: ",
        "CPU KV cache size: ",
        "Maximum concurrency for 2,048 tokens per request: ",
        "init engine (",
        "Detected the chat template content format to be 'openai'. You can set ",
    ):
        assert sum(line.startswith(start) for line in stage.said) == 1, start
    bars = capsys.readouterr().err
    assert "Adding requests: 100%" in bars
    assert "Processed prompts: 100%" in bars
    assert "est. speed input: " in bars


@pytest.mark.parametrize("key", FURTHER)
def test_further_models(stage: Stage, capsys: pytest.CaptureFixture[str], key: str) -> None:
    laid.lay_or_skip(stage.hub, FURTHER[key])
    assert stage.run(script("further_models"), "-m", key) == 0
    check(stage.outputs[0], capsys.readouterr().out, count=1, media=1)


@pytest.mark.parametrize("key", ["ernie45_vl", "glm4_1v", "glm4_5v", "glm4_5v_fp8"])
def test_further_models_and_a_video_with_its_times(stage: Stage, capsys: pytest.CaptureFixture[str], key: str) -> None:
    laid.lay_or_skip(stage.hub, FURTHER[key])
    if key == "ernie45_vl":
        # Not in the repository: its own code would fetch it.
        folder = laid.repository(stage.hub, FURTHER[key])
        (folder / "Roboto-Regular.ttf").write_bytes(ImageFont.load_default(12).font_bytes)
    assert stage.run(script("further_models"), "-m", key, "--modality", "video", "--num-frames", "6") == 0
    check(stage.outputs[0], capsys.readouterr().out, count=1, media=1)
    assert stage.outputs[0][0].media[0].given["frames"] == 6


@pytest.mark.parametrize(
    "name", ["baidu/ERNIE-4.5-VL-28B-A3B-PT", "microsoft/Florence-2-large", "microsoft/Phi-4-multimodal-instruct"]
)
def test_repositories_with_a_layout_of_their_own_are_laid_in_it(stage: Stage, name: str) -> None:
    assert converted(read_json(laid.repository(stage.hub, name) / "config.json")) is not None


@pytest.mark.parametrize("count", [0, 1, 2])
@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("gemma3n", "google/gemma-3n-E2B-it"),
        ("phi4_mm", "microsoft/Phi-4-multimodal-instruct"),
        ("qwen2_audio", "Qwen/Qwen2-Audio-7B-Instruct"),
    ],
)
def test_sounds(stage: Stage, capsys: pytest.CaptureFixture[str], key: str, name: str, count: int) -> None:
    laid.lay_or_skip(stage.hub, name)
    assert stage.run(script("sounds"), "-m", key, "--num-audios", str(count), "--num-prompts", "2") == 0
    check(stage.outputs[0], capsys.readouterr().out, count=2, media=count)
    heard = [[receipt.used["seconds"] for receipt in output.media] for output in stage.outputs[0]]
    assert heard == [[0.8, 1.8][:count]] * 2
    adapters = {output.lora_request.lora_name for output in stage.outputs[0] if output.lora_request}
    assert adapters == ({"speech"} if key == "phi4_mm" else set())


def test_one_pixel_makes_another_picture(stage: Stage) -> None:
    laid.repository(stage.hub, "llava-hf/llava-1.5-7b-hf")
    for words in (["--image-repeat-prob", "1"], ["--image-repeat-prob=0"], ["--disable_mm_preprocessor_cache"]):
        assert stage.run(script("one_item"), "--use-different-prompt-per-request", *words, "--seed", "3") == 0
    repeated, changed, uncached = ([output.media[0] for output in call] for call in stage.outputs)
    assert [receipt.cached for receipt in repeated] == [False, True, True, True]
    assert not any(receipt.cached for receipt in (*changed, *uncached))
    assert len({receipt.digest for receipt in changed}) == 4
    assert len({output.prompt for output in stage.outputs[0]}) == 4


def test_a_processor_class_reads_the_extra_arguments_of_each_request(stage: Stage) -> None:
    laid.repository(stage.hub, "llava-hf/llava-1.5-7b-hf")
    assert stage.run(script("one_item"), "-m", "barred", "--num-prompts", "2") == 0
    for output in stage.outputs[0]:
        ids = [token for token in output.outputs[0].token_ids if token not in (28, 29)]
        assert len(set(ids)) == len(ids) > 30


def test_a_script_sees_what_python_would_give_it(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    (stage.folder / "beside_the_script.py").write_text("VALUE = 5")
    source = "import sys\nimport beside_the_script\nprint(__name__, sys.argv[1:], beside_the_script.VALUE)\n"
    before = (list(sys.argv), list(sys.path))
    assert stage.run(source, "-x", "--", "--help", "y z") == 0
    assert capsys.readouterr().out == "__main__ ['-x', '--', '--help', 'y z'] 5\n"
    assert (sys.argv, sys.path) == before
    assert stage.run("import sys\nprint(sys.argv[1:])", "--help") == 0
    assert capsys.readouterr().out == "['--help']\n"


def test_an_error_names_the_line_that_asked(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    source = "from vllm import LLM\n\nLLM('no/such')\n"
    assert stage.run(source) == 1
    shown = capsys.readouterr().err
    assert f"{stage.folder / 'script.py'}:3:" in shown
    assert "'no/such' is neither in the local cache" in shown
    assert stage.run("from vllm import LLM\nLLM(max_modellen=5)") == 1
    assert "Did you mean 'max_model_len'?" in capsys.readouterr().err
    with pytest.raises(ZeroDivisionError):
        stage.run("def half(x):\n    return x / 0\n\n\nhalf(1)")
    file = stage.folder / "script.py"
    assert capsys.readouterr().err == f"{file}:5: half(1)\n{file}:2: return x / 0\n"
    with pytest.raises(SystemExit) as caught:
        stage.run("raise SystemExit(7)")
    assert caught.value.code == 7


def test_import_without_the_command(place: Stage) -> None:
    code = "import beheld.compat.vllm\nfrom vllm import SamplingParams as P\nprint(P(max_tokens=3).max_tokens)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "3\n"
    assert SamplingParams(max_tokens=3).max_tokens == 3


@pytest.mark.skipif(not LONG, reason="starts three processes; BEHELD_LONG=1 runs it")
def test_ranks_that_a_script_starts() -> None:
    command = [sys.executable, "-m", "beheld.cli.main", "run-vllm", str(SCRIPTS / "ranks.py")]
    done = subprocess.run(
        [*command, "--model", str(tiny.checkpoint("llama"))], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("rank ")]
    assert sorted(lines) == sorted(f"rank {n % 2} of 2: Prompt {n}: 4 tokens" for n in range(6))


@pytest.mark.skipif(not LONG, reason="starts three processes; BEHELD_LONG=1 runs it")
def test_a_script_under_torchrun() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "beheld", "run-vllm"]
    done = subprocess.run(
        [*command, str(SCRIPTS / "launched.py"), "--model", str(tiny.checkpoint("llama"))],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "2 processes, 2 answers, the same: True\n"
    assert done.stderr.count("Each of torchrun's 2 processes computes the whole model") == 2


def test_torchruns_processes_on_a_host_share_its_memory() -> None:
    """torchrun tells each in LOCAL_WORLD_SIZE how many they are; what follows is tested in runner/test_capacity.py."""
    others = ("BEHELD_HOST_SHARES", "VLLM_DP_SIZE")
    environment = {name: value for name, value in os.environ.items() if name not in others}
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=3", str(SCRIPTS / "launched_shares.py")],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    # Their lines may meet.
    assert done.stdout.count("one of 3") == 3


@pytest.mark.skipif(not LONG, reason="starts three processes; BEHELD_LONG=1 runs it")
def test_torchruns_processes_have_an_engine_each() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "beheld", "run-vllm"]
    done = subprocess.run(
        [*command, str(SCRIPTS / "launched_engines.py"), "--model", str(tiny.checkpoint("llama"))],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[(0, 2, ['Hello', 'One']), (1, 2, ['The sky is'])]\n"


def test_tools_in_mistrals_layout(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    """Its folder has transformers' layout, too; the text of a call is JSON, without the mark before it."""
    example_repositories.lay(stage.hub, "mistralai/Mistral-7B-Instruct-v0.3")
    assert stage.run(script("tools")) == 0
    shown = capsys.readouterr().out
    assert "calls ['get_current_weather']" in shown
    assert "says It is 85 degrees fahrenheit in Dallas." in shown
    assert (
        '[TOOL_RESULTS]{"content": "85 degrees", "call_id": "a1b2c3d4e"}[/TOOL_RESULTS]' in stage.outputs[1][0].prompt
    )
