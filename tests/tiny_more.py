"""Small random checkpoints of further families: pictures and videos before a language model, no new kind of attention.

Each is laid out as the checkpoint that its function names; see tiny.py for what they have in common.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests import tiny
from tests import tiny_text as text
from tests.tiny_media import FORMS, MARKERS

SIGLIP = {
    "hidden_size": 32,
    "image_size": 56,
    "intermediate_size": 64,
    "model_type": "siglip_vision_model",
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "patch_size": 14,
    "vision_use_head": False,
}
PIXTRAL = {
    "head_dim": 16,
    "hidden_size": 32,
    "image_size": 112,
    "intermediate_size": 64,
    "model_type": "pixtral",
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "patch_size": 14,
    "rope_theta": 10000.0,
}
SEEDS: dict[str, int] = {
    "mistral3": 1,
    "pixtral_hf": 1,
    "aya_vision": 2,
    "cohere2_vision": 1,
    "internvl": 1,
    "idefics3": 1,
    "smolvlm": 1,
    "llava_next_video": 1,
}
"""Family -> the seed of its weights; chosen so that greedy choices are clear (see oracle/test_tiny.py)."""

ALL_PARTS = """{%%- for part in message.content -%%}
{%%- if part.type == 'image' -%%}{{- '%s' -}}{%%- elif part.type == 'video' -%%}{{- '%s' -}}
{%%- elif part.type == 'audio' -%%}{{- '%s' -}}
{%%- else -%%}{{- part.text -}}{%%- endif -%%}{%%- endfor -%%}"""


def chat(before: str, after: str, image: str, video: str = "", audio: str = "", bos: str = "") -> str:
    """A template of one kind of turn: `before` and `after` with %role% in them, parts in their order between."""
    opening = "{{- '" + before.replace("%role%", "' + message.role + '") + "' -}}"
    closing = "{{- '" + after + "' -}}"
    parts = ALL_PARTS % (image, video, audio)
    turn = opening + "{%- if message.content is string -%}{{- message.content -}}{%- else -%}" + parts + "{%- endif -%}"
    head = "{{- '" + bos + "' -}}" if bos else ""
    return head + "{%- for message in messages -%}" + turn + closing + "{%- endfor -%}"


def pixels(kind: str, owner: str, **own: Any) -> dict[str, Any]:
    """A preprocessor_config.json."""
    return {
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": tiny.CLIP_MEAN,
        "image_processor_type": kind,
        "image_std": tiny.CLIP_STD,
        "processor_class": owner,
        "resample": 3,
        "rescale_factor": 1 / 255,
    } | own


def language(kind: str, architecture: str, **own: Any) -> dict[str, Any]:
    """A text_config."""
    return (
        tiny.LLAMA_SHAPE
        | {
            "architectures": [architecture],
            "max_position_embeddings": 4096,
            "model_type": kind,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "torch_dtype": "bfloat16",
        }
        | own
    )


def qwen_tokens(path: Path, owner: str, extra: tuple[str, ...], named: dict[str, str]) -> dict[str, int]:
    """A byte-level tokenizer with the usual turn markers and `extra` tokens, some of them `named`."""
    (path / "chat_template.jinja").write_text(named.pop("chat_template"), encoding="utf-8")
    specials = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *extra)
    return text.write_qwen_tokenizer(path, specials, "<|im_end|>", {"processor_class": owner, **named})


def llama_tokens(path: Path, owner: str, extra: tuple[str, ...], form: str) -> dict[str, int]:
    """A tokenizer as Llama 2 has it with `extra` tokens, `<pad>` among them, and a chat template."""
    (path / "chat_template.jinja").write_text(form, encoding="utf-8")
    settings = {"processor_class": owner, "pad_token": "<pad>", "padding_side": "left"}
    return text.write_llama_tokenizer(path, extra, settings)


# --- Mistral 3 and Pixtral -------------------------------------------------------------------------------------------

MISTRAL_MARKS = ("[INST]", "[/INST]", "[IMG]", "[IMG_BREAK]", "[IMG_END]", "<pad>")
MISTRAL_CHAT = chat("[INST]", "[/INST]", "[IMG]", bos="<s>")


def make_mistral3(path: Path) -> None:
    """As mistralai/Mistral-Small-3.1-24B-Instruct-2503: pictures of their own size, rows ended by a break."""
    ids = llama_tokens(path, "PixtralProcessor", MISTRAL_MARKS, MISTRAL_CHAT)
    config = {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "image_token_index": ids["[IMG]"],
        "model_type": "mistral3",
        "multimodal_projector_bias": False,
        "projector_hidden_act": "gelu",
        "spatial_merge_size": 2,
        "text_config": language("mistral", "MistralForCausalLM", head_dim=24, sliding_window=None),
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vision_config": PIXTRAL,
        "vision_feature_layer": -1,
    }
    _pixtral_processor(path, merge=2)
    tiny._write_model(path, config, tiny._llama_generation(ids), ids, seed=SEEDS["mistral3"])


def make_pixtral_hf(path: Path) -> None:
    """As mistral-community/pixtral-12b: LLaVA's class with Pixtral's tower; heads wider than hidden size over heads."""
    ids = llama_tokens(path, "PixtralProcessor", MISTRAL_MARKS, MISTRAL_CHAT)
    config = {
        "architectures": ["LlavaForConditionalGeneration"],
        "ignore_index": -100,
        "image_seq_length": 1,
        "image_token_index": ids["[IMG]"],
        "model_type": "llava",
        "projector_hidden_act": "gelu",
        "text_config": language("mistral", "MistralForCausalLM", head_dim=24, sliding_window=None),
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
        "vision_config": PIXTRAL | {"image_size": 70},
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
    }
    _pixtral_processor(path, merge=1, longest=70)
    tiny._write_model(path, config, tiny._llama_generation(ids), ids, seed=SEEDS["pixtral_hf"])


def _pixtral_processor(path: Path, merge: int, longest: int = 112) -> None:
    size = {"size": {"longest_edge": longest}, "patch_size": {"height": 14, "width": 14}}
    text.write_json(path / "preprocessor_config.json", pixels("PixtralImageProcessor", "PixtralProcessor", **size))
    settings = {
        "image_break_token": "[IMG_BREAK]",
        "image_end_token": "[IMG_END]",
        "image_token": "[IMG]",
        "patch_size": 14,
        "processor_class": "PixtralProcessor",
    }
    text.write_json(path / "processor_config.json", settings | ({"spatial_merge_size": merge} if merge > 1 else {}))


# --- Cohere ----------------------------------------------------------------------------------------------------------

COHERE = {
    "attention_bias": False,
    "head_dim": 16,
    "layer_norm_eps": 1e-5,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "logit_scale": 0.25,
    "sliding_window": 24,
}
COHERE_TURN = "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>{}<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"
COHERE_MARKS = ("<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>")
COHERE_MARKS += ("<|IMG_PATCH|>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_LINE_BREAK|>")


def _cohere_chat(marker: str) -> str:
    before = "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>"
    return chat(before, "<|END_OF_TURN_TOKEN|>", marker, bos="") + (
        "{%- if add_generation_prompt -%}{{- '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' -}}{%- endif -%}"
    )


def make_aya_vision(path: Path) -> None:
    """As CohereForAI/aya-vision-8b: SigLIP, tiles with names before them, sliding layers, full ones without rotary."""
    marks = (*COHERE_MARKS, "<image>", "TILE", "TILE_GLOBAL")
    ids = qwen_tokens(path, "AyaVisionProcessor", marks, {"chat_template": _cohere_chat("<image>")})
    config = {
        "adapter_layer_norm_eps": 1e-6,
        "alignment_intermediate_size": 64,
        "architectures": ["AyaVisionForConditionalGeneration"],
        "downsample_factor": 2,
        "image_token_index": ids["<|IMG_PATCH|>"],
        "model_type": "aya_vision",
        "text_config": language("cohere2", "Cohere2ForCausalLM", **COHERE),
        "torch_dtype": "float16",
        "vision_config": SIGLIP | {"image_size": 56},
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
    }
    size = {"size": {"height": 56, "width": 56}, "crop_to_patches": True, "max_patches": 4, "min_patches": 1}
    text.write_json(path / "preprocessor_config.json", pixels("GotOcr2ImageProcessor", "AyaVisionProcessor", **size))
    settings = {"downsample_factor": 2, "img_size": 56, "patch_size": 14, "processor_class": "AyaVisionProcessor"}
    text.write_json(path / "processor_config.json", settings)
    tiny._write_model(path, config, tiny._qwen_generation(ids), ids, seed=SEEDS["aya_vision"], keep=("<|im_end|>",))


def make_cohere2_vision(path: Path) -> None:
    """As CohereLabs/command-a-vision-07-2025: SigLIP with shuffled pixels, tiles in rows."""
    named = {
        "boi_token": "<|START_OF_IMG|>",
        "eoi_token": "<|END_OF_IMG|>",
        "image_token": "<|IMG_PATCH|>",
        "img_line_break_token": "<|IMG_LINE_BREAK|>",
    }
    owner = "Cohere2VisionProcessor"
    ids = qwen_tokens(path, owner, COHERE_MARKS, named | {"chat_template": _cohere_chat("<|IMG_PATCH|>")})
    config = {
        "alignment_intermediate_size": 64,
        "architectures": ["Cohere2VisionForConditionalGeneration"],
        "downsample_factor": 2,
        "image_token_id": ids["<|IMG_PATCH|>"],
        "model_type": "cohere2_vision",
        "text_config": language("cohere2", "Cohere2ForCausalLM", **COHERE),
        "torch_dtype": "bfloat16",
        "vision_config": SIGLIP | {"image_size": 56},
    }
    # The processor calls the number of embeddings along a tile's side its patch size.
    size = {"size": {"height": 56, "width": 56}, "crop_to_patches": True, "max_patches": 3, "patch_size": 2}
    text.write_json(path / "preprocessor_config.json", pixels("Cohere2VisionImageProcessor", owner, **size))
    text.write_json(path / "processor_config.json", {"processor_class": owner})
    tiny._write_model(path, config, tiny._qwen_generation(ids), ids, seed=SEEDS["cohere2_vision"], keep=("<|im_end|>",))


# --- InternVL --------------------------------------------------------------------------------------------------------


def make_internvl(path: Path) -> None:
    """As OpenGVLab/InternVL3-1B-hf: tiles with a thumbnail, videos frame by frame with their numbers in words."""
    named = {
        "context_image_token": "<IMG_CONTEXT>",
        "end_image_token": "</img>",
        "start_image_token": "<img>",
        "video_token": "<video>",
    }
    form = chat("<|im_start|>%role%\\n", "<|im_end|>\\n", "<IMG_CONTEXT>\\n", "<video>\\n")
    form += "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
    ids = qwen_tokens(path, "InternVLProcessor", tuple(named.values()), named | {"chat_template": form})
    config = {
        "architectures": ["InternVLForConditionalGeneration"],
        "downsample_ratio": 0.5,
        "image_seq_length": 4,
        "image_token_id": ids["<IMG_CONTEXT>"],
        "model_type": "internvl",
        "projector_hidden_act": "gelu",
        "text_config": language("qwen2", "Qwen2ForCausalLM", rope_theta=1000000.0, use_sliding_window=False),
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vision_config": {
            "attention_bias": True,
            "hidden_size": 32,
            "image_size": [56, 56],
            "intermediate_size": 64,
            "model_type": "internvl_vision",
            "norm_type": "layer_norm",
            "num_attention_heads": 2,
            "num_hidden_layers": 2,
            "patch_size": [14, 14],
            "use_absolute_position_embeddings": True,
            "use_qk_norm": False,
        },
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
    }
    size = {"size": {"height": 56, "width": 56}}
    tiles = {"crop_to_patches": False, "max_patches": 4, "min_patches": 1}
    text.write_json(
        path / "preprocessor_config.json", pixels("GotOcr2ImageProcessor", "InternVLProcessor", **size, **tiles)
    )
    video = pixels("", "InternVLProcessor", **size, video_processor_type="InternVLVideoProcessor")
    del video["image_processor_type"]
    text.write_json(path / "video_preprocessor_config.json", video)
    text.write_json(path / "processor_config.json", {"image_seq_length": 4, "processor_class": "InternVLProcessor"})
    tiny._write_model(path, config, tiny._qwen_generation(ids), ids, seed=SEEDS["internvl"], keep=("<|im_end|>",))


# --- Idefics3 and SmolVLM --------------------------------------------------------------------------------------------

IDEFICS_MARKS = ("<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>")
IDEFICS_MARKS += tuple(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5))
IDEFICS_CHAT = chat("%role%: ", "<end_of_utterance>\\n", "<image>", "<video>", bos="<|im_start|>") + (
    "{%- if add_generation_prompt -%}{{- 'Assistant:' -}}{%- endif -%}"
)


def _idefics(path: Path, kind: str, architecture: str, tower: str, owner: str, images: str, **more: Any) -> None:
    ids = qwen_tokens(path, owner, (*IDEFICS_MARKS, *more.pop("marks", ())), {"chat_template": IDEFICS_CHAT})
    config = {
        "architectures": [architecture],
        "image_token_id": ids["<image>"],
        "model_type": kind,
        "scale_factor": 2,
        "text_config": language("llama", "LlamaForCausalLM", pad_token_id=ids["<|endoftext|>"]),
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vision_config": {
            "hidden_size": 32,
            "image_size": 56,
            "intermediate_size": 64,
            "model_type": tower,
            "num_attention_heads": 2,
            "num_hidden_layers": 2,
            "patch_size": 14,
        },
    }
    size = {"size": {"longest_edge": 112}, "max_image_size": {"longest_edge": 56}, "do_image_splitting": True}
    text.write_json(path / "preprocessor_config.json", pixels(images, owner, do_pad=True, **size, **more))
    text.write_json(path / "processor_config.json", {"image_seq_len": 4, "processor_class": owner})
    tiny._write_model(path, config, tiny._qwen_generation(ids), ids, seed=SEEDS[kind], keep=("<|im_end|>",))


def make_idefics3(path: Path) -> None:
    """As HuggingFaceM4/Idefics3-8B-Llama3: tiles in rows and columns with their names, and the whole picture."""
    _idefics(
        path,
        "idefics3",
        "Idefics3ForConditionalGeneration",
        "idefics3_vision",
        "Idefics3Processor",
        "Idefics3ImageProcessor",
    )


def make_smolvlm(path: Path) -> None:
    """As HuggingFaceTB/SmolVLM2-2.2B-Instruct: as Idefics3, and videos with a sentence and a time before each frame."""
    video = pixels("", "SmolVLMProcessor", size={"longest_edge": 112}, max_image_size={"longest_edge": 56})
    del video["image_processor_type"]
    sampling = {"fps": 1, "max_frames": 64, "video_size": {"longest_edge": 56}}
    text.write_json(
        path / "video_preprocessor_config.json",
        video | {"video_processor_type": "SmolVLMVideoProcessor", "num_frames": 64, "fps": 1},
    )
    _idefics(
        path,
        "smolvlm",
        "SmolVLMForConditionalGeneration",
        "smolvlm_vision",
        "SmolVLMProcessor",
        "SmolVLMImageProcessor",
        marks=("<video>",),
        video_sampling=sampling,
    )


# --- LLaVA-NeXT-Video and Mantis -------------------------------------------------------------------------------------


def make_llava_next_video(path: Path) -> None:
    """As llava-hf/LLaVA-NeXT-Video-7B-hf: frames pooled to a quarter of their embeddings."""
    owner = "LlavaNextVideoProcessor"
    form = chat("%role%: ", " ", "<image>\\n", "<video>\\n").replace("message.role", "message.role.upper()")
    form += "{%- if add_generation_prompt -%}{{- 'ASSISTANT:' -}}{%- endif -%}"
    ids = llama_tokens(path, owner, ("<image>", "<video>", "<pad>"), form)
    pinpoints = [[56, 112], [112, 56], [112, 112], [168, 56], [56, 168]]
    config = {
        "architectures": ["LlavaNextVideoForConditionalGeneration"],
        "ignore_index": -100,
        "image_grid_pinpoints": pinpoints,
        "image_token_index": ids["<image>"],
        "model_type": "llava_next_video",
        "projector_hidden_act": "gelu",
        "spatial_pool_mode": "average",
        "spatial_pool_stride": 2,
        "text_config": language("llama", "LlamaForCausalLM"),
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_image_newline_parameter": True,
        "video_token_index": ids["<video>"],
        "vision_config": tiny.CLIP_SHAPE,
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
    }
    clip = tiny._clip_processor("LlavaNextImageProcessor", owner)
    tiles = {"aspect_ratio_setting": "anyres", "image_grid_pinpoints": pinpoints, "do_pad": True}
    text.write_json(path / "preprocessor_config.json", clip | tiles)
    video = dict(clip)
    del video["image_processor_type"]
    text.write_json(
        path / "video_preprocessor_config.json", video | {"video_processor_type": "LlavaNextVideoVideoProcessor"}
    )
    text.write_json(path / "processor_config.json", tiny._llava_processor(owner) | {"video_token": "<video>"})
    tiny._write_model(path, config, tiny._llama_generation(ids), ids, seed=SEEDS["llava_next_video"])


TINY: dict[str, Callable[[Path], None]] = {
    "mistral3": make_mistral3,
    "pixtral_hf": make_pixtral_hf,
    "aya_vision": make_aya_vision,
    "cohere2_vision": make_cohere2_vision,
    "internvl": make_internvl,
    "idefics3": make_idefics3,
    "smolvlm": make_smolvlm,
    "llava_next_video": make_llava_next_video,
}
IMAGE_FAMILIES = tuple(TINY)
VIDEO_FAMILIES = ("internvl", "llava_next_video", "smolvlm")
CHATML_TURN = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
FORMS.update(
    {
        "mistral3": "[INST]{}[/INST]",
        "pixtral_hf": "[INST]{}[/INST]",
        "aya_vision": COHERE_TURN,
        "cohere2_vision": COHERE_TURN,
        "internvl": CHATML_TURN,
        "idefics3": "<|im_start|>User:{}<end_of_utterance>\nAssistant:",
        "smolvlm": "<|im_start|>User:{}<end_of_utterance>\nAssistant:",
        "llava_next_video": "USER: {} ASSISTANT:",
    }
)
MARKERS.update(
    {
        "mistral3": ("[IMG]", ""),
        "pixtral_hf": ("[IMG]", ""),
        "aya_vision": ("<image>", ""),
        "cohere2_vision": ("<|IMG_PATCH|>", ""),
        "internvl": ("<IMG_CONTEXT>\n", "<video>\n"),
        "idefics3": ("<image>", ""),
        "smolvlm": ("<image>", "<video>"),
    }
)
