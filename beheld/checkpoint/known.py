"""The model families that are known by name: those that are tested against transformers, and those refused, with why.

Every row of TESTED has a small checkpoint of its own in tests/ whose answers are compared with transformers', token by
token; docs/models.md is written from these tables (`beheld models --markdown`).
"""

from __future__ import annotations

from dataclasses import dataclass

from beheld.checkpoint import missing

PICTURES = ("image",)
BOTH = ("image", "video")
SOUND = ("audio",)
SEEN_AND_HEARD = ("image", "audio")
ALL = ("image", "video", "audio")


@dataclass(frozen=True)
class Known:
    """A family that runs.

    Attributes:
        name: as the tests call it.
        architecture: the class name in config.json.
        example: a public checkpoint of it.
        takes: what it accepts besides text.
        note: what is peculiar to it.
    """

    name: str
    architecture: str
    example: str
    takes: tuple[str, ...] = ()
    note: str = ""


TESTED = (
    Known(
        "aria", "AriaForConditionalGeneration", "rhymes-ai/Aria", PICTURES, "experts; pictures asked by learned queries"
    ),
    Known(
        "aya_vision",
        "AyaVisionForConditionalGeneration",
        "CohereForAI/aya-vision-8b",
        PICTURES,
        "tiles; sliding and full layers",
    ),
    Known(
        "blip2",
        "Blip2ForConditionalGeneration",
        "Salesforce/blip2-opt-2.7b",
        PICTURES,
        "one picture, before the prompt; learned positions; with OPT only",
    ),
    Known(
        "chameleon",
        "ChameleonForConditionalGeneration",
        "facebook/chameleon-7b",
        PICTURES,
        "pictures become tokens of a codebook, which answers may not hold; messages cannot be continued",
    ),
    Known(
        "cohere2_vision",
        "Cohere2VisionForConditionalGeneration",
        "CohereLabs/command-a-vision-07-2025",
        PICTURES,
        "tiles; sliding and full layers",
    ),
    Known(
        "ernie4_5_vl_moe",
        "Ernie4_5_VLMoeForConditionalGeneration",
        "baidu/ERNIE-4.5-VL-28B-A3B-PT",
        BOTH,
        "experts of their own for what is seen; three-axis positions; times are drawn on the frames, with a font in "
        "the checkpoint's folder; of the main branch, without its code: config.json, tokenizer.model (with the "
        "packages sentencepiece and protobuf) and preprocessor_config.json are converted; its folder holds no font, so "
        "that videos there want Roboto-Regular.ttf put into it; what else it sets is refused",
    ),
    Known(
        "florence2",
        "Florence2ForConditionalGeneration",
        "florence-community/Florence-2-large",
        PICTURES,
        "an encoder reads the prompt; one picture to a prompt; forced tokens and bans on repetition; no beams; "
        "messages cannot be continued; microsoft/Florence-2-large too, without its code",
    ),
    Known(
        "fuyu",
        "FuyuForCausalLM",
        "adept/fuyu-8b",
        PICTURES,
        "one picture, before the prompt, as rows of patches without a tower; messages cannot be continued",
    ),
    Known("gemma2", "Gemma2ForCausalLM", "google/gemma-2-2b-it", (), "soft caps; sliding and full layers"),
    Known(
        "gemma3",
        "Gemma3ForConditionalGeneration",
        "google/gemma-3-4b-it",
        PICTURES,
        "each picture is read both ways, in one step",
    ),
    Known(
        "gemma3n",
        "Gemma3nForConditionalGeneration",
        "google/gemma-3n-E2B-it",
        SEEN_AND_HEARD,
        "per-layer embeddings; layers that read another's cache; its tower needs the package timm; hears the "
        "first 30 s of a sound, each as if it were the only one of its prompt",
    ),
    Known("gemma3_text", "Gemma3ForCausalLM", "google/gemma-3-1b-it", (), "sliding and full layers"),
    Known(
        "gemma4",
        "Gemma4ForConditionalGeneration",
        "google/gemma-4-E2B-it",
        ALL,
        "per-layer embeddings; layers that read another's cache; hears the first 30 s of a sound",
    ),
    Known(
        "glm4v",
        "Glm4vForConditionalGeneration",
        "zai-org/GLM-4.1V-9B-Thinking",
        BOTH,
        "three-axis positions; a configuration with the text's settings at its top is converted",
    ),
    Known("glm4v_moe", "Glm4vMoeForConditionalGeneration", "zai-org/GLM-4.5V", BOTH, "three-axis positions; experts"),
    Known(
        "glm4v_moe_fp8",
        "Glm4vMoeForConditionalGeneration",
        "zai-org/GLM-4.5V-FP8",
        BOTH,
        "as GLM-4.5V; FP8 weights (compressed-tensors) stay FP8 where a GPU multiplies them, else dequantized",
    ),
    Known("glm46v", "Glm46VForConditionalGeneration", "zai-org/GLM-4.6V-Flash", BOTH, "three-axis positions"),
    Known(
        "hunyuan_vl",
        "HunYuanVLForConditionalGeneration",
        "tencent/HunyuanOCR",
        PICTURES,
        "four-axis positions; a newline ends each row of a picture",
    ),
    Known("idefics3", "Idefics3ForConditionalGeneration", "HuggingFaceM4/Idefics3-8B-Llama3", PICTURES, "tiles"),
    Known("internvl", "InternVLForConditionalGeneration", "OpenGVLab/InternVL3-1B-hf", BOTH, "tiles"),
    Known(
        "lfm2_vl",
        "Lfm2VlForConditionalGeneration",
        "LiquidAI/LFM2-VL-450M",
        PICTURES,
        "most layers are short convolutions; pictures of their own size, large ones in tiles",
    ),
    Known("llama", "LlamaForCausalLM", "meta-llama/Llama-2-7b-chat-hf"),
    Known(
        "llama4",
        "Llama4ForConditionalGeneration",
        "meta-llama/Llama-4-Scout-17B-16E-Instruct",
        PICTURES,
        "tiles; attention in chunks; experts; layers without positions, whose queries grow",
    ),
    Known("llava", "LlavaForConditionalGeneration", "llava-hf/llava-1.5-7b-hf", PICTURES),
    Known("llava_next", "LlavaNextForConditionalGeneration", "llava-hf/llava-v1.6-mistral-7b-hf", PICTURES, "tiles"),
    Known(
        "llava_next_video",
        "LlavaNextVideoForConditionalGeneration",
        "llava-hf/LLaVA-NeXT-Video-7B-hf",
        BOTH,
        "pooled frames",
    ),
    Known(
        "llava_onevision",
        "LlavaOnevisionForConditionalGeneration",
        "llava-hf/llava-onevision-qwen2-0.5b-ov-hf",
        BOTH,
        "tiles for a lone picture",
    ),
    Known(
        "mantis",
        "LlavaForConditionalGeneration",
        "TIGER-Lab/Mantis-8B-siglip-llama3",
        PICTURES,
        "as LLaVA; pictures are numbered in words",
    ),
    Known("mistral", "MistralForCausalLM", "mistralai/Mistral-7B-v0.1", (), "sliding layers"),
    Known(
        "mistral3",
        "Mistral3ForConditionalGeneration",
        "mistralai/Mistral-Small-3.1-24B-Instruct-2503",
        PICTURES,
        "pictures of their own size",
    ),
    Known(
        "paligemma",
        "PaliGemmaForConditionalGeneration",
        "google/paligemma-3b-mix-224",
        PICTURES,
        "the prompt is read both ways, in one step; no shared prefixes; pictures only; messages cannot be continued",
    ),
    Known(
        "paligemma2",
        "PaliGemmaForConditionalGeneration",
        "google/paligemma2-3b-ft-docci-448",
        PICTURES,
        "as PaliGemma, with soft caps",
    ),
    Known(
        "phi4_mm",
        "Phi4MultimodalForCausalLM",
        "microsoft/Phi-4-multimodal-instruct",
        SEEN_AND_HEARD,
        "pictures and sounds are read with the checkpoint's own adapters, both with that of pictures; each sound is "
        "heard as if it were the only one of its prompt; a sequence keeps the rotary scale of its prompt; the main "
        "revision's layout and transformers'",
    ),
    Known(
        "pixtral_hf",
        "LlavaForConditionalGeneration",
        "mistral-community/pixtral-12b",
        PICTURES,
        "pictures of their own size",
    ),
    Known(
        "mllama",
        "MllamaForConditionalGeneration",
        "meta-llama/Llama-3.2-11B-Vision-Instruct",
        PICTURES,
        "some layers attend to the pictures beside the text; a prefix is shared only with the same pictures",
    ),
    Known(
        "molmo2",
        "Molmo2ForConditionalGeneration",
        "allenai/Molmo2-8B",
        BOTH,
        "all pictures of a prompt see each other, in one step; vocabulary in two parts; one video",
    ),
    Known("qwen2", "Qwen2ForCausalLM", "Qwen/Qwen2-0.5B-Instruct"),
    Known(
        "qwen2_5_omni",
        "Qwen2_5OmniThinkerForConditionalGeneration",
        "Qwen/Qwen2.5-Omni-7B",
        ALL,
        "three-axis positions; answers in text; a video's own sound is not heard",
    ),
    Known(
        "qwen2_audio",
        "Qwen2AudioForConditionalGeneration",
        "Qwen/Qwen2-Audio-7B-Instruct",
        SOUND,
        "hears the first 30 s of a sound",
    ),
    Known("qwen2_vl", "Qwen2VLForConditionalGeneration", "Qwen/Qwen2-VL-7B-Instruct", BOTH, "three-axis positions"),
    Known(
        "qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", "Qwen/Qwen2.5-VL-3B-Instruct", BOTH, "three-axis positions"
    ),
    Known(
        "qwen3_vl",
        "Qwen3VLForConditionalGeneration",
        "Qwen/Qwen3-VL-4B-Instruct",
        BOTH,
        "three-axis positions; the tower also enters the first layers",
    ),
    Known(
        "qwen3_omni_moe",
        "Qwen3OmniMoeThinkerForConditionalGeneration",
        "Qwen/Qwen3-Omni-30B-A3B-Instruct",
        ALL,
        "as Qwen2.5-Omni; experts; each sound is heard as if it were the only one of its prompt",
    ),
    Known(
        "qwen3_vl_moe",
        "Qwen3VLMoeForConditionalGeneration",
        "Qwen/Qwen3-VL-30B-A3B-Instruct",
        BOTH,
        "as Qwen3-VL; experts",
    ),
    Known(
        "smolvlm",
        "SmolVLMForConditionalGeneration",
        "HuggingFaceTB/SmolVLM2-2.2B-Instruct",
        BOTH,
        "tiles; each video is told of as if it were the only one of its prompt; its processor needs the package "
        "num2words",
    ),
    Known(
        "voxtral",
        "VoxtralForConditionalGeneration",
        "mistralai/Voxtral-Mini-3B-2507",
        SOUND,
        "windows of 30 s, each filled up; without mistral-common; no tools, no transcription requests",
    ),
)

REFUSED = {
    "minicpmv4_6": "some of its layers are linear attention, for which there is no cache",
    "minicpmv4_7": "some of its layers are linear attention, for which there is no cache",
    "qwen3_5": "some of its layers are linear attention, for which there is no cache",
    "qwen3_5_moe": "some of its layers are linear attention, for which there is no cache",
}
"""Model type -> what is missing. These are refused by name: no answer is better than a wrong one."""


NEEDS = {"gemma3n": "timm"}
"""Model type -> a package that transformers' model needs and that beheld does not bring."""


# How the tests compare a family with transformers, where that is not the same for all; a test keeps these true.
ONE_PICTURE = frozenset({"blip2", "florence2", "fuyu"})
"""Families that take one picture to a prompt."""
WHOLE_PROMPTS = frozenset({"florence2", "paligemma", "paligemma2"})
"""Families whose prompts are computed in one step and never shared."""
JOINED = frozenset({"glm46v", "glm4v", "glm4v_moe", "glm4v_moe_fp8", "molmo2", "smolvlm"})
"""Families of which transformers' generate() takes pictures or a video in one prompt: for both together it is given the
embeddings that its own towers make of each item."""
ON_A_GPU = frozenset(
    (
        *("chameleon", "ernie4_5_vl_moe", "florence2", "gemma3", "gemma3n", "lfm2_vl", "llama4", "llava"),
        *("llava_onevision", "mllama", "molmo2", "paligemma", "phi4_mm", "qwen2_5_vl", "qwen2_audio", "qwen3_vl"),
        "qwen3_omni_moe",
    )
)
"""Families whose tokens are also compared on a GPU, with graphs and compiled layers."""
TOLERANCES = {"gemma4": 2e-4}
"""Family -> by how much log-probabilities may differ; else TOLERANCE."""
TOLERANCE = 1e-4


def checked(row: Known) -> str:
    """In words, what the comparisons of this family cover besides those of all."""
    words = [] if row.name in WHOLE_PROMPTS else ["cut prompts", "shared prefixes"]
    if "image" in row.takes:
        words.append("one picture" if row.name in ONE_PICTURE else "several pictures")
    words += ["videos"] * ("video" in row.takes)
    words += ["sounds"] * ("audio" in row.takes)
    if {"image", "video"} <= set(row.takes):
        words.append("pictures beside a video" + " (joined)" * (row.name in JOINED))
    words += ["a GPU"] * (row.name in ON_A_GPU)
    if row.name in TOLERANCES:
        words.append(f"within {TOLERANCES[row.name]:g}")
    return ", ".join(words)


def markdown() -> str:
    """docs/models.md."""
    lines = [
        "# Models",
        "",
        "Written by `beheld models --markdown > docs/models.md`; a test checks that it is current.",
        "",
        "## What runs",
        "",
        "For each of these, a small random checkpoint in the layout of the real one is part of the tests. Its greedy",
        "answers equal those of transformers' `generate` in float32 on a CPU, token by token, and their",
        f"log-probabilities within {TOLERANCE:g}: alone, in a batch of sixteen, with steps that overlap, and after",
        "preemption. The column *also checked* says what else is compared in the same way: prompts cut into steps,",
        "prefixes shared with another prompt, the media, and the tokens that a GPU gives with graphs and compiled",
        "layers. Where pictures beside a video are *joined*, transformers' `generate` refuses both in one prompt:",
        "there it is given the embeddings that its own towers make of each, in their places. `beheld verify MODEL`",
        "compares a checkpoint of yours stage by stage, of all these families, such prompts too.",
        "",
        "| family | architecture | for example | takes | also checked | remarks |",
        "|---|---|---|---|---|---|",
    ]
    for known in sorted(TESTED, key=lambda known: known.name):
        takes = ", ".join(("text", *known.takes))
        lines.append(
            f"| {known.name} | {known.architecture} | {known.example} | {takes} | {checked(known)} | {known.note} |"
        )
    lines += [
        "",
        "Other architectures of transformers with full and sliding attention are tried by the same means. At load, a",
        "dry pass checks that every layer calls the paged attention once; what they answer has not been compared.",
        "",
        "## What is refused",
        "",
        "| model type | what is missing |",
        "|---|---|",
        *(f"| {name} | {reason} |" for name, reason in sorted(REFUSED.items())),
        *missing.markdown(),
    ]
    return "\n".join(lines) + "\n"
