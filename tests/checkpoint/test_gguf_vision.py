"""A GGUF file with the file of its vision part answers as the checkpoint that both were made of."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType as Kind

from beheld import LLM, SamplingParams
from beheld.checkpoint.gguf.projector import vision_file_of
from beheld.checkpoint.resolve import resolve
from beheld.core.config import EngineArgs
from beheld.core.errors import ModelError
from tests import tiny, tiny_gguf

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BEHELD_GGUF_CACHE", str(tmp_path / "cache"))


def filtered(name: str, path: Path, resample: int) -> Path:
    """A checkpoint with the filter that GGUF's models have."""
    shutil.copytree(tiny.checkpoint(name), path)
    file = path / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"resample": resample}))
    return path


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return filtered("idefics3", tmp_path_factory.mktemp("idefics3") / "source", 1)


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return filtered("gemma3", tmp_path_factory.mktemp("gemma3") / "source", 2)


def answers(model: Path, video: bool = False, **options: Any) -> list[tuple[list[int], list[int]]]:
    asked = [
        [{"type": "image_pil", "image_pil": picture}, {"type": "text", "text": "What is it?"}]
        for picture in tiny.pictures(3, 0)
    ]
    asked.append([*asked[0][:1], *asked[1]])
    if video:
        asked.append([{"type": "video", "video": tiny.frames(4)}, asked[0][1]])
    messages = [[{"role": "user", "content": content}] for content in [*asked, [asked[0][1]]]]
    with LLM(str(model), dtype="float32", seed=0, max_model_len=512, **options) as llm:
        found = llm.chat(messages, GREEDY, use_tqdm=False)
    return [(list(output.prompt_token_ids or ()), list(output.outputs[0].token_ids)) for output in found]


@pytest.mark.parametrize("kind", [Kind.F32, Kind.BF16], ids=lambda kind: kind.name)
def test_answers_are_those_of_the_checkpoint(source: Path, tmp_path: Path, kind: Kind) -> None:
    assert answers(tiny_gguf.idefics3(source, tmp_path / "files", kind)) == answers(source)


@pytest.mark.parametrize("kind", [Kind.F32, Kind.BF16], ids=lambda kind: kind.name)
def test_a_tower_that_enters_the_first_layers(tmp_path: Path, kind: Kind) -> None:
    source = tiny.checkpoint("qwen3_vl")
    assert answers(tiny_gguf.qwen3_vl(source, tmp_path / "files", kind)) == answers(source)


answers_of_source = cache(answers)


@pytest.mark.parametrize("kind", [Kind.F32, Kind.BF16], ids=lambda kind: kind.name)
def test_a_pool_and_a_norm_after_the_tower(gemma3: Path, tmp_path: Path, kind: Kind) -> None:
    assert answers(tiny_gguf.gemma3(gemma3, tmp_path / "files", kind)) == answers_of_source(gemma3)


@pytest.mark.parametrize("kind", [Kind.F32, Kind.BF16], ids=lambda kind: kind.name)
@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen2_vl"])
def test_queries_keys_and_values_that_are_joined(name: str, tmp_path: Path, kind: Kind) -> None:
    source = tiny.checkpoint(name)
    found = answers(tiny_gguf.qwen2_vl(source, tmp_path / "files", kind), video=True)
    assert found == answers_of_source(source, video=True)


# The checkpoint's numbers are float16.
@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16], ids=lambda kind: kind.name)
def test_a_tower_that_ends_before_its_last_layers(tmp_path: Path, kind: Kind) -> None:
    source = tiny.checkpoint("llava")
    assert answers(tiny_gguf.llava(source, tmp_path / "files", kind)) == answers_of_source(source)


def test_its_text_model_alone(tmp_path: Path) -> None:
    source = tiny.checkpoint("qwen3_vl")
    file = tiny_gguf.qwen3_vl(source, tmp_path / "files")
    prompt = {"prompt_token_ids": [5 + 7 * number % 80 for number in range(40)]}
    found = []
    for model, options in ((source, {}), (file, {"mmproj": ""})):
        with LLM(str(model), dtype="float32", max_model_len=512, **options) as llm:
            found.append(llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0].token_ids)
    assert found[0] == found[1]


def test_the_file_is_the_one_next_to_it_or_the_one_that_is_named(source: Path, tmp_path: Path) -> None:
    file = tiny_gguf.idefics3(source, tmp_path / "files")
    vision = file.with_name("mmproj-a.gguf")
    assert vision_file_of(file, None) == vision

    def modality(**options: Any) -> str:
        folder = resolve(EngineArgs(model=str(file), **options))
        return str(json.loads((folder / "config.json").read_text())["model_type"])

    assert modality() == "idefics3"
    assert modality(mmproj="") == "llama"
    elsewhere = tmp_path / "elsewhere.gguf"
    vision.rename(elsewhere)
    assert modality() == "llama"
    assert modality(mmproj=str(elsewhere)) == "idefics3"
    for name in ("mmproj-f16.gguf", "x.mmproj.gguf"):
        shutil.copy(elsewhere, file.with_name(name))
    with pytest.raises(ModelError, match=r"2 mmproj files are next to a\.gguf.*--mmproj"):
        modality()
    with pytest.raises(ModelError, match="no mmproj file"):
        modality(mmproj=str(tmp_path / "none.gguf"))


def said(**entries: Any) -> tiny_gguf.Edit:
    return lambda metadata, arrays: metadata.update({f"clip.{k.replace('__', '.')}": v for k, v in entries.items()})


REFUSED: dict[str, tuple[tiny_gguf.Edit, str]] = {
    "projector": (said(projector_type="ldp"), "of the kind 'ldp'; gemma3, idefics3, .* can be run"),
    "size": (said(vision__image_size=57), "is not a whole number of 2 x 2 patches"),
    "zero": (said(vision__block_count=0), r"clip\.vision\.block_count is 0"),
    "missing": (lambda metadata, arrays: metadata.pop("clip.vision.image_mean"), r"clip\.vision\.image_mean is None"),
    "weights": (
        lambda metadata, arrays: arrays.update({"v.other.weight": arrays["v.post_ln.weight"]}),
        "v.other.weight",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_refused(source: Path, tmp_path: Path, name: str) -> None:
    edit, reason = REFUSED[name]
    file = tiny_gguf.idefics3(source, tmp_path / "files", edit=edit)
    with pytest.raises(ModelError, match=reason):
        resolve(EngineArgs(model=str(file)))


REFUSED_OF: dict[str, tuple[Callable[..., Path], str, tiny_gguf.Edit, str]] = {
    "tiles": (tiny_gguf.llava, "llava", said(vision__image_grid_pinpoints=[336, 672]), "is of no LLaVA-1.5"),
    "several layers": (tiny_gguf.llava, "llava", said(vision__feature_layer=[1, 2]), r"\(feature_layer\)"),
    "pool": (tiny_gguf.gemma3, "gemma3", said(vision__projector__scale_factor=3), "number of 3 x 3 patches"),
    "no windows": (
        tiny_gguf.qwen2_vl,
        "qwen2_5_vl",
        lambda metadata, arrays: metadata.pop("clip.vision.n_wa_pattern"),
        r"clip\.vision\.n_wa_pattern is None",
    ),
    "layers": (tiny_gguf.qwen2_vl, "qwen2_5_vl", said(vision__wa_layer_indexes=[3]), "numbers of its 3 layers"),
}


@pytest.mark.parametrize("name", REFUSED_OF)
def test_what_cannot_be_read_of_other_models_is_refused(tmp_path: Path, name: str) -> None:
    write, source, edit, reason = REFUSED_OF[name]
    file = write(tiny.checkpoint(source), tmp_path / "files", edit=edit)
    with pytest.raises(ModelError, match=reason):
        resolve(EngineArgs(model=str(file)))


def test_layers_without_windows_may_be_listed(tmp_path: Path) -> None:
    file = tiny_gguf.qwen2_vl(
        tiny.checkpoint("qwen2_5_vl"), tmp_path / "files", edit=said(vision__wa_layer_indexes=[0, 2])
    )
    folder = resolve(EngineArgs(model=str(file)))
    assert json.loads((folder / "config.json").read_text())["vision_config"]["fullatt_block_indexes"] == [0, 2]


@pytest.mark.parametrize(("name", "token"), [("gemma3", "<image_soft_token>"), ("llava", "<image>")])
def test_a_placeholder_that_the_text_model_lacks(gemma3: Path, tmp_path: Path, name: str, token: str) -> None:
    whole = gemma3 if name == "gemma3" else tiny.checkpoint(name)
    source = tmp_path / "source"
    shutil.copytree(whole, source)
    file = source / "tokenizer.json"
    file.write_text(file.read_text().replace(token, "<other>"))
    found = answers(getattr(tiny_gguf, name)(source, tmp_path / "files"))
    config = json.loads((source / "config.json").read_text())
    # It comes behind the 512 tokens of the text model.
    usual = [(list(map({512: config["image_token_index"]}.get, ids, ids)), made) for ids, made in found]
    assert usual == answers_of_source(whole)


def test_the_first_files_name_no_projector(tmp_path: Path) -> None:
    file = tiny_gguf.llava(
        tiny.checkpoint("llava"),
        tmp_path / "files",
        edit=lambda metadata, arrays: metadata.pop("clip.projector_type"),
    )
    folder = resolve(EngineArgs(model=str(file)))
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llava"


def test_a_projection_of_another_width_is_refused(tmp_path: Path) -> None:
    def edit(metadata: dict[str, Any], arrays: dict[str, Any]) -> None:
        arrays["mm.2.weight"] = arrays["mm.2.weight"][:32]

    file = tiny_gguf.llava(tiny.checkpoint("llava"), tmp_path / "files", edit=edit)
    with pytest.raises(ModelError, match="makes 32 numbers of a patch, and the text model has 64"):
        resolve(EngineArgs(model=str(file)))


def test_a_vision_part_of_another_model_is_refused(source: Path, tmp_path: Path) -> None:
    tiny_gguf.idefics3(source, tmp_path / "files")
    other = tiny_gguf.write(tiny.checkpoint("llama"), tmp_path / "llama.gguf")
    with pytest.raises(ModelError, match="needs the token '<image>'"):
        resolve(EngineArgs(model=str(other), mmproj=str(tmp_path / "files" / "mmproj-a.gguf")))


def test_layers_that_nothing_lists_are_refused(tmp_path: Path) -> None:
    def edit(metadata: dict[str, Any], arrays: dict[str, Any]) -> None:
        metadata["clip.vision.is_deepstack_layers"] = [True, False, False]

    file = tiny_gguf.qwen3_vl(tiny.checkpoint("qwen3_vl"), tmp_path / "files", edit=edit)
    with pytest.raises(ModelError, match=r"6 weights that no model of its kind has, such as 'v\.deepstack\.1"):
        resolve(EngineArgs(model=str(file)))
