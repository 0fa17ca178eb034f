"""`beheld verify`: nothing differs where nothing is wrong, and what is wrong is named at its stage."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version

from beheld.cli.main import main
from beheld.core.config import EngineArgs
from beheld.inputs.media import audio, video
from beheld.models.hf import HFAdapter
from beheld.tools.verify.compare import DIFFERENT, NOT_COMPARED, SAME, StageVerdict, compare, first_difference
from beheld.tools.verify.layout import pairs
from beheld.tools.verify.questions import made_up
from beheld.tools.verify.reference import Reference
from beheld.tools.verify.run import verify
from beheld.tools.verify.trace import Question, Trace
from tests import tiny, tiny_adapted, tiny_cross, tiny_quantized
from tests.inputs.pipes import write_video
from tests.tiny_layouts import make_main_ernie

NEW = Version(transformers.__version__) >= Version("5.23")


def prompt_of(family: str, count: int) -> str:
    return tiny.wrap(family, tiny.markers(family, num_images=1) * count + "What is it?")


def ask(folder: Path, prompt: str, images: list[Any]) -> tuple[dict[str, StageVerdict], StageVerdict | None]:
    # In this process, where a test can make it go wrong.
    args = EngineArgs(model=str(folder), media_workers=0)
    stages, culprit = verify(args, Question(prompt, tuple(images), "plain", 6))
    return {stage.name: stage for stage in stages}, culprit


def main_phi(folder: Path) -> str:
    tiny_adapted.make_main_phi4_mm(folder)
    return "<|user|><|image_1|><|image_2|>What?<|end|><|assistant|>"


def microsoft_florence(folder: Path) -> str:
    tokens = folder.with_name("bart")
    tokens.mkdir()
    tiny_cross.make_microsoft_florence2(folder, tokens)
    return "<MORE_DETAILED_CAPTION>"


def main_ernie(folder: Path) -> str:
    make_main_ernie(folder)
    return prompt_of("ernie4_5_vl_moe", 2)


def fp8(folder: Path) -> str:
    tiny_quantized.quantize(tiny.checkpoint("glm4v_moe"), folder, "bfloat16")
    return prompt_of("glm4v_moe", 2)


LAYOUTS: dict[str, tuple[Callable[[Path], str], int, str]] = {
    "phi4mm": (main_phi, 2, "configuration and weights of the layout 'phi4mm' converted"),
    "florence2": (microsoft_florence, 1, "configuration and weights of the layout 'florence2' converted"),
    "ernie4_5_moe_vl": (main_ernie, 2, "the configuration of the layout 'ernie4_5_moe_vl' converted"),
    "fp8": (fp8, 2, "its FP8 weights dequantized"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_that_transformers_cannot_read(layout: str, tmp_path: Path) -> None:
    make, count, words = LAYOUTS[layout]
    folder = tmp_path / "model"
    folder.mkdir()
    prompt = make(folder)
    stages, culprit = ask(folder, prompt, made_up(count))
    assert culprit is None
    assert stages["layout"].verdict == NOT_COMPARED
    assert words in stages["layout"].detail
    assert stages["logits"].verdict == stages["tokens"].verdict == SAME
    assert stages["processor's input_ids" if layout == "florence2" else "merged embeddings"].verdict == SAME


def test_what_goes_wrong_in_a_converted_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from beheld.lora.slots import LoRASlots

    prompt = main_phi(tmp_path)
    # The adapter for pictures is forgotten.
    monkeypatch.setattr(LoRASlots, "runs", lambda self, slots_T, device: None)
    _, culprit = ask(tmp_path, prompt, made_up(2))
    assert culprit is not None
    assert culprit.name == "logits"


def test_prompts_of_different_lengths_are_told_apart_where_they_begin_to_differ() -> None:
    theirs, mine = (
        Trace(
            prompt_ids=(1, *[9] * count, 2),
            media_ids=frozenset({9}),
            features={"pixel_values": [torch.zeros(count, 3)]},
            embeds_TH=torch.zeros(count + 2, 4),
            positions=[torch.arange(count + 2)[None]],
            logits=[torch.zeros(5)],
            token_ids=[0],
        )
        for count in (5, 3)
    )
    stages = {stage.name: stage for stage in compare(theirs, mine)}
    culprit = first_difference(list(stages.values()))
    assert culprit is not None
    assert culprit.name == "token ids"
    assert culprit.detail.startswith("7 in transformers, 5 in beheld; from token 4: ")
    assert culprit.detail.endswith("they differ only in the number of media placeholders")
    assert stages["pixel values"].detail == "(5, 3) in transformers, (3, 3) in beheld"
    later = {stages[name].verdict for name in ("merged embeddings", "positions", "logits", "tokens")}
    assert later == {NOT_COMPARED}


def test_positions_of_different_lengths_and_axes_are_compared() -> None:
    for theirs, mine, detail in (
        (torch.arange(5)[None], torch.arange(3)[None], "5 in transformers, 3 in beheld"),
        (
            torch.zeros(3, 4),
            torch.ones(4, 4),
            "prompt: [0.0, 0.0, 0.0] in transformers, [1.0, 1.0, 1.0, 1.0] in beheld",
        ),
    ):
        traces = [Trace(positions=[positions]) for positions in (theirs, mine)]
        (stage,) = [stage for stage in compare(*traces) if stage.name == "positions"]
        assert (stage.verdict, stage.detail) == (DIFFERENT, detail)


def test_items_are_found_in_a_tensor_of_all() -> None:
    small, large = torch.arange(6.0).reshape(1, 2, 3), torch.arange(8.0).reshape(1, 2, 4)
    filled = torch.full((1, 2, 1), 7.0)
    strung = torch.cat([torch.cat([small, filled], 2), large])
    # Items follow each other along the first dimension, or along the second where the first is one.
    beside = strung[None]
    for whole, items in ((strung, [small, large]), (beside, [small[None], large[None]])):
        found = pairs("pixel_values", whole, items)
        assert found is not None
        assert all(torch.equal(part, item) for part, item in found)
    assert pairs("pixel_values", strung, [small, small, large]) is None
    assert pairs("pixel_values", strung, [torch.zeros(2, 3, 4)]) is None
    assert pairs("pixel_values", strung, []) is None
    running = torch.tensor([[0, 1], [2, -1], [3, 4]])
    found = pairs("image_token_pooling", running, [running[:2], torch.tensor([[0, 1]])])
    assert found is not None
    assert all(torch.equal(part, item) for part, item in found)
    found = pairs("image_token_pooling", running[2:], [torch.tensor([[1, 0]])])
    assert found is not None
    assert not torch.equal(*found[0])


@pytest.mark.parametrize("family", ["qwen2_5_vl", "glm4v", "ernie4_5_vl_moe", "qwen3_vl"])
def test_a_wrong_rotary_delta(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = HFAdapter.positions

    def wrong(self: HFAdapter, *prompt: Any) -> Any:
        positions, delta = right(self, *prompt)
        return positions, delta + 1

    monkeypatch.setattr(HFAdapter, "positions", wrong)
    _, culprit = ask(tiny.checkpoint(family), prompt_of(family, 1), made_up(1))
    assert culprit is not None
    assert culprit.name == "positions"
    assert "answered token 1" in culprit.detail


def told(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, str]:
    """StageVerdict -> verdict, of a command that finds nothing wrong."""
    assert main(["verify", *words, "--max-tokens", "3", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["first_difference"] is None
    return {stage["name"]: stage["verdict"] for stage in answer["stages"]}


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    verdicts = told(capsys, "mote", "examples/scene.png")
    assert verdicts["rendered prompt"] == verdicts["pixel values"] == verdicts["tokens"] == SAME


@pytest.mark.parametrize(
    ("family", "stage"),
    [
        ("llama", "rendered prompt"),
        ("qwen2_audio", "processor's input_features"),
        ("paligemma", "pixel values"),
        ("fuyu", "pixel values"),
        ("mantis", "pixel values"),
        ("florence2", "pixel values"),
        ("chameleon", "pixel values"),
        ("phi4_mm", "pixel values"),
        ("voxtral", "processor's input_features"),
    ],
)
def test_what_is_not_said_is_made_up(family: str, stage: str, capsys: pytest.CaptureFixture[str]) -> None:
    # Text to a model of text, a sound to one that hears, a plain prompt where there is no chat template.
    verdicts = told(capsys, str(tiny.checkpoint(family)))
    assert verdicts[stage] == verdicts["tokens"] == SAME


def test_files_of_all_kinds_and_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.wav").write_bytes(tiny.wav(tiny.sound(0.4, 3)))
    tiny.picture(84, 56, 1).save(tmp_path / "b.png")
    folder = str(tiny.checkpoint("qwen2_5_omni"))
    marks = tiny.markers("qwen2_5_omni", num_images=1, num_sounds=1)
    # Files stand behind options as well as before them.
    said = ["--prompt", tiny.wrap("qwen2_5_omni", marks + "What?"), str(tmp_path / "b.png")]
    options = ["--max-model-len", "512", "--mm-processor-kwargs", '{"max_pixels": 3136}']
    verdicts = told(capsys, folder, str(tmp_path / "a.wav"), *said, *options)
    for name in ("pixel values", "processor's input_features", "encoder output", "encoder output of audio", "logits"):
        assert verdicts[name] == SAME, name


def test_a_video_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_video(tmp_path / "v.mp4", tiny.frames(10))
    for options in ([], ["--media-io-kwargs", '{"video": {"num_frames": 4}}']):
        verdicts = told(capsys, str(tiny.checkpoint("qwen2_5_vl")), str(tmp_path / "v.mp4"), *options)
        for name in ("decoded video", "rendered prompt", "pixel values of video", "logits"):
            assert verdicts[name] == SAME, name


def first_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The first stage that differs, of a command that finds one."""
    assert main(["verify", *words, "--max-tokens", "1", "--json"]) == 1
    name: str = json.loads(capsys.readouterr().out)["first_difference"]
    return name


def test_a_video_that_is_read_wrongly(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_video(tmp_path / "v.mp4", tiny.frames(10))
    words = (str(tiny.checkpoint("qwen2_5_vl")), str(tmp_path / "v.mp4"))
    with monkeypatch.context() as patched:
        right = video._rgb
        patched.setattr(video, "_rgb", lambda frame, limits: right(frame, limits)[..., ::-1].copy())
        assert first_of(capsys, *words) == "decoded video"
    options = ("--media-io-kwargs", '{"video": {"num_frames": 4}}')
    monkeypatch.setattr(video.FrameSampling, "indices", lambda self, total, fps: [0, 1, 2, 3])
    assert first_of(capsys, *words, *options) == "decoded video"


def test_a_sound_that_is_read_wrongly(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("soundfile" if NEW else "librosa")
    (tmp_path / "a.wav").write_bytes(tiny.wav(tiny.sound(0.4, 3)))
    words = (str(tiny.checkpoint("qwen2_audio")), str(tmp_path / "a.wav"))
    assert told(capsys, *words)["decoded audio"] == SAME
    right = audio._samples
    monkeypatch.setattr(audio, "_samples", lambda frame: 0.99 * right(frame))
    assert first_of(capsys, *words) == "decoded audio"
    monkeypatch.setattr(audio, "_samples", lambda frame: right(frame)[..., :-1])
    assert first_of(capsys, *words) == "decoded audio"


def test_a_sound_that_transformers_cannot_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*given: Any, **options: Any) -> Any:
        raise ImportError("a package is missing")

    monkeypatch.setattr(transformers.audio_utils, "load_audio", refuses)
    (tmp_path / "a.wav").write_bytes(tiny.wav(tiny.sound(0.4, 3)))
    verdicts = told(capsys, str(tiny.checkpoint("qwen2_audio")), str(tmp_path / "a.wav"))
    assert verdicts["decoded audio"] == NOT_COMPARED
    assert verdicts["processor's input_features"] == verdicts["tokens"] == SAME


def test_code_that_a_repository_brings_is_not_run_where_transformers_has_the_class(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(tiny.checkpoint("qwen2_vl"), tmp_path / "model")
    settings = tmp_path / "model" / "preprocessor_config.json"
    own = {"auto_map": {"AutoProcessor": "processing_own.OwnProcessor"}}
    settings.write_text(json.dumps(json.loads(settings.read_text(encoding="utf-8")) | own), encoding="utf-8")
    (tmp_path / "model" / "processing_own.py").write_text("raise RuntimeError('the code was run')")
    verdicts = told(capsys, str(tmp_path / "model"), "--trust-remote-code")
    assert verdicts["pixel values"] == verdicts["tokens"] == SAME


def test_options_reach_both_sides(capsys: pytest.CaptureFixture[str]) -> None:
    folder, picture = str(tiny.checkpoint("qwen2_vl")), "examples/scene.png"
    sizes = []
    for options in ([], ["--mm-processor-kwargs", '{"max_pixels": 3136}']):
        assert main(["verify", folder, picture, "--max-tokens", "1", *options]) == 0
        (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("pixel values")]
        sizes.append(line.split("same")[1])
    assert sizes[0] != sizes[1]


@pytest.mark.parametrize("family", ["llava", "llama"])
def test_text_alone_is_asked_as_the_template_reads_it(family: str, capsys: pytest.CaptureFixture[str]) -> None:
    """LLaVA's template reads a list of parts and drops a string; Llama's reads a string."""
    assert main(["verify", str(tiny.checkpoint(family)), "--text-only", "--max-tokens", "1"]) == 0
    assert "No stage differs." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("llama", "examples/scene.png"), "does not accept image; it takes text input only"),
        (("qwen2_vl", "missing.png"), "There is no file 'missing.png'"),
        (("qwen2_vl", "https://example.com/a.png"), "is no file. Fetch it first"),
        (("qwen2_vl", "examples/scene.png", "--text-only"), "--text-only was said, and media were given"),
        (("qwen2_vl", "--max-tokens", "0"), "--max-tokens must be at least 1"),
    ],
)
def test_what_cannot_be_asked(words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    family, *rest = words
    assert main(["verify", str(tiny.checkpoint(family)), *rest]) == 1
    assert message in capsys.readouterr().err


def test_an_option_without_meaning_here_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["verify", "mote", "--tensor-parallel-size", "2"])
    assert "--tensor-parallel-size" in capsys.readouterr().err


def test_a_report_for_programs_says_why_nothing_was_compared(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*given: Any, **options: Any) -> Any:
        raise ValueError("features and tokens do not match")

    monkeypatch.setattr(Reference, "_trace", refuses)
    assert main(["verify", str(tiny.checkpoint("llava")), "examples/scene.png", "--json"]) == 1
    said = capsys.readouterr()
    report = json.loads(said.out)
    assert report["stages"] == []
    assert "features and tokens do not match" in report["error"]
    assert report["error"] in said.err


def test_rounded_keys_and_values_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["verify", str(tiny.checkpoint("llama")), "--prompt", "A cat sat", "--max-tokens", "6", "--json"]
    assert main([*words, "--kv-cache-dtype", "fp8"]) == 0
    lost = json.loads(capsys.readouterr().out)
    assert lost["method"] == "keys and values in fp8"
    assert max(lost["kl"]) > 0
    assert main([*words, "--kv-cache-dtype", "fp8", "--quantization", "int8"]) == 0
    both = json.loads(capsys.readouterr().out)
    assert both["method"] == "int8, keys and values in fp8"
    assert both["kl"] != lost["kl"]
    # The type that they have anyway rounds nothing, so stages are compared.
    assert main([*words, "--kv-cache-dtype", "float32"]) == 0
    assert json.loads(capsys.readouterr().out)["first_difference"] is None
