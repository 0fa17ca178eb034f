"""What the documents' scripts ask the network for, laid onto the disk: repositories, pictures, videos.

Under each repository's name lies a tiny checkpoint of its family, in the layout of the Hugging Face cache. Its
configuration is as long as the repository's own, where that is below 32768 positions; where a script needs an input of
a kind that the weights depend on, the weights are made anew.
"""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from beheld.families import page
from beheld.inputs.fetch.pinned_http import parse
from beheld.inputs.fetch.url_mirror import places
from tests import tiny, tiny_adapted, tiny_layouts, tiny_own_glm, tiny_own_qwen_vl
from tests import tiny_text as text
from tests.inputs import pipes

REVISION = "0" * 40
WIKIMEDIA = "https://upload.wikimedia.org/wikipedia/commons/"


@dataclass(frozen=True)
class Laid:
    """How a repository is laid.

    Attributes:
        family: the tiny checkpoint.
        positions: what its text model is said to be made for, 32768 where it is more; None leaves it as it is.
        rope: the scaling of its rotary positions.
        vocabulary: rows of its embeddings and its head, where a script names ids beyond the tiny ones.
        config, preprocessor, video: changes of config.json, after which the weights are made anew, of its preprocessor,
            and of the one of videos.
        make: writes the tiny checkpoint in the repository's own layout, where transformers has another.
    """

    family: str
    positions: int | None = 32768
    rope: Mapping[str, Any] = field(default_factory=dict)
    vocabulary: int | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    preprocessor: Mapping[str, Any] = field(default_factory=dict)
    video: Mapping[str, Any] = field(default_factory=dict)
    make: Callable[[Path], None] | None = None


REPOSITORIES: dict[str, Laid] = {
    "CohereForAI/aya-vision-8b": Laid("aya_vision", positions=8192),
    "CohereLabs/command-a-vision-07-2025": Laid("cohere2_vision"),
    "HuggingFaceM4/Idefics3-8B-Llama3": Laid(
        "idefics3",
        # The script asks for a length of 1092: three tiles of 364, as long as a tile is as large as the real one.
        config={"vision_config": {"image_size": 364, "patch_size": 91}},
        preprocessor={"max_image_size": {"longest_edge": 364}, "size": {"longest_edge": 1456}},
    ),
    "Qwen/Qwen-VL": Laid("qwen_vl", positions=None),
    "Qwen/Qwen-VL-Chat": Laid("qwen_vl_chat", positions=None, make=tiny_own_qwen_vl.make_with_code),
    "Qwen/Qwen2-Audio-7B-Instruct": Laid("qwen2_audio", positions=8192),
    "Qwen/Qwen2-VL-2B-Instruct": Laid("qwen2_vl"),
    "Qwen/Qwen2-VL-7B-Instruct": Laid("qwen2_vl"),
    "Qwen/Qwen2.5-VL-3B-Instruct": Laid("qwen2_5_vl"),
    "Salesforce/blip2-opt-2.7b": Laid("blip2", positions=None),
    "THUDM/glm-4v-9b": Laid("glm4v_9b", positions=None, make=tiny_own_glm.make_wide_glm4v_9b),
    "TIGER-Lab/Mantis-8B-siglip-llama3": Laid("mantis", positions=8192, vocabulary=128_256),
    "HuggingFaceTB/SmolVLM2-2.2B-Instruct": Laid(
        "smolvlm",
        # The script asks for tiles of 384.
        config={"vision_config": {"image_size": 384, "patch_size": 96}},
        preprocessor={"max_image_size": {"longest_edge": 384}, "size": {"longest_edge": 1536}},
        video={"max_image_size": {"longest_edge": 384}, "size": {"longest_edge": 384}},
    ),
    "OpenGVLab/InternVL2-2B": Laid("internvl_chat"),
    "adept/fuyu-8b": Laid("fuyu", positions=16384),
    "allenai/Molmo-7B-D-0924": Laid("molmo", positions=None),
    "baidu/ERNIE-4.5-VL-28B-A3B-PT": Laid("ernie4_5_vl_moe", make=tiny_layouts.make_main_ernie),
    "deepseek-ai/DeepSeek-OCR": Laid("deepseek_ocr", positions=None),
    "deepseek-ai/deepseek-vl2-tiny": Laid("deepseek_vl_v2", positions=None),
    "facebook/bart-large": Laid("florence2", positions=None, make=tiny_layouts.make_bart),
    "facebook/chameleon-7b": Laid("chameleon", positions=4096),
    "google/gemma-3-4b-it": Laid("gemma3"),
    "google/gemma-3n-E2B-it": Laid("gemma3n"),
    "google/paligemma-3b-mix-224": Laid("paligemma", positions=8192),
    "google/paligemma2-3b-ft-docci-448": Laid("paligemma2", positions=8192),
    "h2oai/h2ovl-mississippi-800m": Laid("h2ovl_chat", positions=8192),
    "llava-hf/LLaVA-NeXT-Video-7B-hf": Laid("llava_next_video", positions=4096, rope={"factor": 2.0, "type": "linear"}),
    "llava-hf/llava-1.5-7b-hf": Laid("llava", positions=4096),
    "llava-hf/llava-onevision-qwen2-7b-ov-hf": Laid("llava_onevision"),
    "llava-hf/llava-v1.6-mistral-7b-hf": Laid("llava_next"),
    "meta-llama/Llama-3.2-11B-Vision-Instruct": Laid("mllama"),
    "microsoft/Florence-2-large": Laid("florence2", positions=None, make=tiny_layouts.make_florence2),
    "microsoft/Phi-3.5-vision-instruct": Laid("phi3_v"),
    "microsoft/Phi-4-multimodal-instruct": Laid("phi4_mm", make=tiny_adapted.make_main_phi4_mm),
    "mistral-community/pixtral-12b": Laid("pixtral_hf"),
    "nvidia/NVLM-D-72B": Laid("nvlm_d"),
    "openbmb/MiniCPM-V-2_6": Laid("minicpmv"),
    "openbmb/MiniCPM-o-2_6": Laid("minicpmo"),
    "rednote-hilab/dots.ocr": Laid("dots_ocr"),
    "rhymes-ai/Aria": Laid("aria", positions=65536, vocabulary=93_654),
    "tencent/HunyuanOCR": Laid("hunyuan_vl"),
    "zai-org/glm-4v-9b": Laid("glm4v_9b", positions=None, make=tiny_own_glm.make_wide_glm4v_9b),
    "zai-org/GLM-4.1V-9B-Thinking": Laid("glm4v", positions=65536),
    "zai-org/GLM-4.5V": Laid("glm4v_moe", positions=65536),
    "zai-org/GLM-4.5V-FP8": Laid("glm4v_moe_fp8", positions=65536),
}


BESIDE = {"microsoft/Florence-2-large": ("facebook/bart-large",)}
"""Repository -> those whose tokenizer its script names."""


def repository(hub: Path, name: str) -> Path:
    """The folder of a repository in the cache folder `hub`, laid if it is not there yet."""
    root = hub / f"models--{name.replace('/', '--')}"
    folder = root / "snapshots" / REVISION
    if folder.is_dir():
        return folder
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text(REVISION)
    folder.mkdir(parents=True)
    _fill(folder, REPOSITORIES[name])
    return folder


def lay_or_skip(hub: Path, name: str) -> None:
    """Lay a repository; the test is skipped, with what the list says of it, if its family is not one that runs."""
    family = REPOSITORIES[name].family
    if family not in {row.name for row in page.tested()}:
        pytest.skip(f"{family}: {page.refused().get(family, 'it is not among the families yet')}")
    for further in (name, *BESIDE.get(name, ())):
        repository(hub, further)


def _fill(folder: Path, laid: Laid) -> None:
    rewritten = bool(laid.config or laid.vocabulary)
    if laid.make is not None:
        laid.make(folder)
    for file in tiny.checkpoint(laid.family).iterdir() if laid.make is None else ():
        if file.name.endswith(".json") or rewritten:
            shutil.copy(file, folder)
        else:
            (folder / file.name).symlink_to(file)
    for name, changes in (
        ("config.json", laid.config),
        ("preprocessor_config.json", laid.preprocessor),
        ("video_preprocessor_config.json", laid.video),
    ):
        if changes:
            content = json.loads((folder / name).read_text(encoding="utf-8"))
            text.write_json(folder / name, _merged(content, changes))
    if laid.config:
        _anew(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    inner = config.get("text_config", config.get("llm_config", config))
    if laid.positions is not None:
        inner["max_position_embeddings"] = laid.positions
    if laid.rope:
        inner.pop("rope_parameters", None)
        inner["rope_scaling"] = dict(laid.rope)
    if laid.vocabulary is not None:
        _widen(folder, laid.vocabulary)
        inner["vocab_size"] = laid.vocabulary
    text.write_json(folder / "config.json", config)


def _merged(content: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(content)
    for name, value in changes.items():
        out[name] = _merged(out[name], value) if isinstance(value, Mapping) and name in out else value
    return out


def _anew(folder: Path) -> None:
    """Other random weights, for the configuration as it now is."""
    from tokenizers import Tokenizer

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    generation = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab(with_added_tokens=True)
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    tiny._write_model(folder, config, generation, ids, seed=1, keep=("<|im_end|>",))


def _widen(folder: Path, rows: int) -> None:
    """More rows for the embeddings and the head, so small that they never win."""
    import torch
    from safetensors.torch import load_file, save_file

    for file in folder.glob("*.safetensors"):
        weights = load_file(file)
        for name, weight in weights.items():
            if name.endswith(("embed_tokens.weight", "lm_head.weight")) and weight.shape[0] == tiny.VOCAB:
                weights[name] = torch.cat([weight, 1e-3 * weight[:1].expand(rows - tiny.VOCAB, -1)])
        save_file(weights, file, metadata={"format": "pt"})


# --- media -----------------------------------------------------------------------------------------------------------


def pictures(copies: Path, urls: list[str]) -> None:
    """A picture behind each address, in the folder of copies."""
    files(copies, {url: _jpeg(number) for number, url in enumerate(urls)})


def files(copies: Path, contents: Mapping[str, bytes]) -> None:
    """These bytes behind each address, in the folder of copies."""
    for url, content in contents.items():
        path = copies / places(parse(url))[0]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def assets(folder: Path) -> None:
    """The picture, the video and the sounds that scripts ask for by name."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cherry_blossom.jpg").write_bytes(_jpeg(99))
    _film(folder / "sample_demo_1.mp4")
    # Readers go by what a file holds.
    for seed, name in enumerate(("mary_had_lamb", "winning_call")):
        (folder / f"{name}.ogg").write_bytes(tiny.wav(tiny.sound(0.8 + seed, seed)))


def _film(path: Path) -> None:
    """Write three seconds of frames with a sound."""
    import av
    import numpy as np

    silent = pipes.write_video(path.with_suffix(".silent.mp4"), tiny.frames(24))
    sound = (np.sin(np.arange(3 * 16_000) * 0.17) * 8000).astype(np.int16)
    with av.open(str(silent)) as source, av.open(str(path), "w") as made:
        (given,) = source.streams.video
        frames, tone = made.add_stream_from_template(given), made.add_stream("aac", rate=16_000, layout="mono")
        for packet in source.demux(given):
            if packet.dts is not None:
                packet.stream = frames
                made.mux(packet)
        for start in range(0, len(sound), 1024):
            piece = av.AudioFrame.from_ndarray(sound[None, start : start + 1024], format="s16", layout="mono")
            piece.sample_rate, piece.pts = 16_000, start
            made.mux(tone.encode(piece))
        made.mux(tone.encode(None))
    silent.unlink()


def _jpeg(seed: int) -> bytes:
    buffer = io.BytesIO()
    width, height = tiny.SIZES[seed % len(tiny.SIZES)]
    tiny.picture(max(width, 56), max(height, 56), seed).save(buffer, "JPEG")
    return buffer.getvalue()
