"""The files of the checkpoint other than its weights: config, tokenizer, template and processor settings.

Everything is of transformers' Qwen2-VL classes, so that mote takes exactly the path of a real checkpoint. The
tokenizer is byte-level with whole words on top: a word (with the blank before it) is one token when it is in the
list, and a run of bytes when it is not. There are no merges. A word seen in a picture is always quoted, so it has
no blank before it and is spelled letter by letter, which is what reading needs.
"""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SPECIALS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
VOCAB_SIZE = 640
PATCH = 10
MERGE = 2
TEMPORAL = 2
MEAN = (0.5, 0.5, 0.5)
STD = (0.25, 0.25, 0.25)
IMAGE_PIXELS = (78_400, 90_000)
VIDEO_PIXELS = (20_000, 27_000)

TEMPLATE = """{%- macro content_of(message, add_ids) -%}
{%- if message.content is string -%}
{{- message.content -}}
{%- else -%}
{%- for part in message.content or [] -%}
{%- if part.type == 'image' or part.type == 'image_url' or 'image' in part or 'image_url' in part -%}
{%- set count.images = count.images + 1 -%}
{{- 'Picture ' ~ count.images ~ ': ' if add_ids else '' -}}
<|vision_start|><|image_pad|><|vision_end|>
{%- elif part.type == 'video' or part.type == 'video_url' or 'video' in part or 'video_url' in part -%}
{%- set count.videos = count.videos + 1 -%}
{{- 'Video ' ~ count.videos ~ ': ' if add_ids else '' -}}
<|vision_start|><|video_pad|><|vision_end|>
{%- elif part is string -%}
{{- part -}}
{%- elif 'text' in part -%}
{{- part.text -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- set count = namespace(images=0, videos=0) -%}
{%- for message in messages -%}
{{- '<|im_start|>' ~ message.role ~ '\\n' ~ content_of(message, add_vision_id | default(false)) ~ '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


def read_words() -> list[str]:
    """The words that are whole tokens, most useful first."""
    return (Path(__file__).parent / "vocabulary.txt").read_text().split()


def build_tokenizer(words: list[str]) -> Tokenizer:
    """The tokenizer whose whole words are `words`, most useful first, as many as fit VOCAB_SIZE."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    assert len(alphabet) == 256
    room = VOCAB_SIZE - len(SPECIALS) - len(alphabet)
    chosen = list(dict.fromkeys("\u0120" + word for word in words))[:room]
    tokens = [*SPECIALS, *alphabet, *chosen]
    tokens += [f"<|unused_{index}|>" for index in range(VOCAB_SIZE - len(tokens))]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIALS))
    return tokenizer


def config_dict(depth: int = 7, layers: int = 4) -> dict[str, object]:
    """The content of config.json. The small rotary bases suit a grid of tens of patches, not of thousands."""
    ids = {token: index for index, token in enumerate(SPECIALS)}
    text = {
        "model_type": "qwen2_vl_text",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.02,
        "use_sliding_window": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [8, 12, 12]},
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    }
    vision = {
        "model_type": "qwen2_vl_vision",
        "depth": depth,
        "embed_dim": 192,
        "hidden_size": 256,
        "hidden_act": "quick_gelu",
        "mlp_ratio": 4,
        "num_heads": 4,
        "in_channels": 3,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": TEMPORAL,
        "rope_parameters": {"rope_type": "axial", "rope_theta": 100.0},
        "dtype": "bfloat16",
    }
    return {
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "model_type": "qwen2_vl",
        "dtype": "bfloat16",
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
        "tie_word_embeddings": True,
        "text_config": text,
        "vision_config": vision,
    }


def _pixels(bounds: tuple[int, int]) -> dict[str, object]:
    return {
        "size": {"shortest_edge": bounds[0], "longest_edge": bounds[1]},
        "do_resize": True,
        "resample": 3,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(MEAN),
        "image_std": list(STD),
        "do_convert_rgb": True,
        "patch_size": PATCH,
        "merge_size": MERGE,
        "temporal_patch_size": TEMPORAL,
        "processor_class": "Qwen2VLProcessor",
    }


def write_settings(folder: Path, words: list[str], **sizes: int) -> None:
    """Write every file of the checkpoint but the weights and the card into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    build_tokenizer(words).save(str(folder / "tokenizer.json"), pretty=False)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    files = {
        "config.json": config_dict(**sizes),
        "generation_config.json": {
            "bos_token_id": 0,
            "eos_token_id": [SPECIALS.index("<|im_end|>"), SPECIALS.index("<|endoftext|>")],
            "pad_token_id": 0,
            "do_sample": False,
            "max_new_tokens": 256,
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "processor_class": "Qwen2VLProcessor",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "extra_special_tokens": list(SPECIALS),
            "model_max_length": 8192,
            "clean_up_tokenization_spaces": False,
        },
        "preprocessor_config.json": _pixels(IMAGE_PIXELS) | {"image_processor_type": "Qwen2VLImageProcessorPil"},
        "video_preprocessor_config.json": _pixels(VIDEO_PIXELS)
        | {
            "video_processor_type": "Qwen2VLVideoProcessor",
            "min_frames": 2,
            "max_frames": 16,
            "do_sample_frames": False,
            "cap_pixels_per_frame": False,
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
