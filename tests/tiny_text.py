"""Tokenizers and chat templates of the tiny checkpoints: trained on a few sentences, stored as the real ones are."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = (
    "What is in this picture? A small red circle stands left of a large blue square.",
    "What is the content of each image? The first image shows a green triangle, the second a yellow star.",
    "Which picture shows the black ring? How many shapes are there? There are three shapes on a white ground.",
    "Describe the video. The orange cross moves from the left to the right, and then up to the top.",
    "Read the text in the image. The text says: HELLO 2026. It is printed in purple letters near the bottom.",
    "You are a helpful assistant. user assistant system USER ASSISTANT: answer the question with one word.",
    "Die Katze schläft auf dem Stuhl; el niño mira la luna; les élèves écoutent; これは絵です。 Это картина.",
)

QWEN_SPECIALS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
ONEVISION_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>", "<video>")
QWEN_TEXT_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

QWEN_TEXT_CHAT = """{%- if messages[0].role != 'system' -%}
{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""

QWEN_VISION_CHAT = """{%- for message in messages -%}
{%- if loop.first and message.role != 'system' -%}
{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' -}}
{%- endif -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.content is string -%}
{{- message.content -}}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' or part.type == 'image_url' or 'image' in part -%}
{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif part.type == 'video' or 'video' in part -%}
{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
{%- elif 'text' in part -%}
{{- part.text -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""

_PARTS_MEDIA_FIRST = """{%- for part in message.content if part.type == 'image' -%}{{- '<image>\\n' -}}{%- endfor -%}
{%- for part in message.content if part.type == 'video' -%}{{- '<video>\\n' -}}{%- endfor -%}
{%- for part in message.content if part.type == 'text' -%}{{- part.text -}}{%- endfor -%}"""

LLAVA_CHAT = (
    "{%- for message in messages -%}\n"
    "{%- if message.role != 'system' -%}{{- message.role.upper() + ': ' -}}{%- endif -%}\n"
    + _PARTS_MEDIA_FIRST
    + "{{- ' ' -}}{%- endfor -%}{%- if add_generation_prompt -%}{{- 'ASSISTANT:' -}}{%- endif -%}"
)
LLAVA_NEXT_CHAT = (
    "{%- for message in messages -%}{%- if message.role == 'user' -%}{{- '[INST] ' -}}\n"
    + _PARTS_MEDIA_FIRST
    + "{{- ' [/INST]' -}}{%- else -%}{{- ' ' + message.content[0].text + '</s> ' -}}{%- endif -%}{%- endfor -%}"
)
ONEVISION_CHAT = (
    "{%- for message in messages -%}{{- '<|im_start|>' + message.role + ' ' -}}\n"
    + _PARTS_MEDIA_FIRST
    + "{{- '<|im_end|>' -}}{%- endfor -%}\n"
    + "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)
LLAMA_TEXT_CHAT = """{{- bos_token -}}
{%- for message in messages -%}
{%- if message.role == 'user' -%}{{- '[INST] ' + message.content + ' [/INST]' -}}
{%- else -%}{{- ' ' + message.content + eos_token -}}{%- endif -%}
{%- endfor -%}"""
GEMMA_CHAT = """{{- bos_token -}}
{%- for message in messages -%}
{{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' -}}
{{- message.content + '<end_of_turn>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\\n' -}}{%- endif -%}"""


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_qwen_tokenizer(path: Path, specials: tuple[str, ...], eos: str, settings: dict[str, Any]) -> dict[str, int]:
    """Byte-level BPE as Qwen2 has it: with vocab.json and merges.txt; returns the ids."""
    draft = Tokenizer(models.BPE())
    draft.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    draft.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=256 + 160, initial_alphabet=alphabet, show_progress=False)
    )
    vocab, merges = _trained(draft)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, fuse_unk=False, byte_fallback=False))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = draft.pre_tokenizer
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.decoder = decoders.ByteLevel()
    _finish(
        path,
        tokenizer,
        specials,
        {
            "add_bos_token": False,
            "add_prefix_space": False,
            "additional_special_tokens": list(specials[1:]),
            "bos_token": None,
            "clean_up_tokenization_spaces": False,
            "eos_token": eos,
            "errors": "replace",
            "model_max_length": 32768,
            "pad_token": "<|endoftext|>",
            "split_special_tokens": False,
            "tokenizer_class": "Qwen2Tokenizer",
            "unk_token": None,
        }
        | settings,
    )
    write_json(path / "vocab.json", vocab)
    lines = ["#version: 0.2", *(" ".join(pair) for pair in merges)]
    (path / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return tokenizer.get_vocab(with_added_tokens=True)


def write_llama3_tokenizer(
    path: Path, marks: tuple[str, ...], last: str, size: int, settings: dict[str, Any]
) -> dict[str, int]:
    """Byte-level BPE as Llama 3 has it: the first of `marks` is put before every text; `last` has the id `size`."""
    draft = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(QWEN_SPLIT.replace(r"|\p{N}|", r"|\p{N}{1,3}|")), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    draft.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    draft.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=256 + 160, initial_alphabet=alphabet, show_progress=False)
    )
    vocab, merges = _trained(draft)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, fuse_unk=False, byte_fallback=False))
    tokenizer.pre_tokenizer = draft.pre_tokenizer
    start = processors.TemplateProcessing(
        single=f"{marks[0]} $A", pair=f"{marks[0]} $A {marks[0]}:1 $B:1", special_tokens=[(marks[0], len(vocab))]
    )
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), start])
    tokenizer.decoder = decoders.ByteLevel()
    reserved = tuple(f"<|reserved_special_token_{n}|>" for n in range(size - len(vocab) - len(marks)))
    _finish(path, tokenizer, (*marks, *reserved, last), settings)
    return tokenizer.get_vocab(with_added_tokens=True)


def write_deepseek_tokenizer(path: Path, specials: tuple[str, ...], settings: dict[str, Any]) -> dict[str, int]:
    """Byte-level BPE under the class of Llama's tokenizer, as DeepSeek has it; returns the ids.

    The first three of `specials` are the beginning of a text, its end and the padding.
    """
    draft = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(QWEN_SPLIT.replace(r"|\p{N}|", r"|\p{N}{1,3}|")), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    draft.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    draft.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=256 + 160, initial_alphabet=alphabet, show_progress=False)
    )
    vocab, merges = _trained(draft)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, fuse_unk=False, byte_fallback=False))
    tokenizer.pre_tokenizer = draft.pre_tokenizer
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.decoder = decoders.ByteLevel()
    named = dict(zip(("bos_token", "eos_token", "pad_token"), specials[:3], strict=True))
    common = {
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "legacy": True,
        "model_max_length": 16384,
        "sp_model_kwargs": {},
        "tokenizer_class": "LlamaTokenizerFast",
        "unk_token": None,
        "use_default_system_prompt": False,
    }
    _finish(path, tokenizer, specials, common | named | settings)
    return tokenizer.get_vocab(with_added_tokens=True)


TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def write_tekken(path: Path, specials: tuple[str, ...], audio: dict[str, Any]) -> dict[str, int]:
    """Byte-level BPE as Mistral stores it, in one file of ranks, special tokens first; returns the ids."""
    draft = Tokenizer(models.BPE())
    draft.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(TEKKEN_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    draft.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=256 + 160, initial_alphabet=alphabet, show_progress=False)
    )
    _, merges = _trained(draft)
    # The byte-level alphabet shows printable bytes as themselves, and the others in order from 256 on.
    shown = [byte for byte in range(256) if chr(byte) in alphabet]
    byte_by_letter = {chr(byte): byte for byte in shown}
    hidden = (byte for byte in range(256) if byte not in shown)
    byte_by_letter |= {chr(256 + number): byte for number, byte in enumerate(hidden)}
    tokens = [bytes([byte]) for byte in range(256)]
    tokens += [bytes(byte_by_letter[letter] for letter in "".join(pair)) for pair in merges]
    size = len(specials) + len(tokens)
    ranks = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": token.decode("utf-8", "replace")}
        for rank, token in enumerate(tokens)
    ]
    marks = [{"is_control": True, "rank": rank, "token_str": token} for rank, token in enumerate(specials)]
    settings = {"default_num_special_tokens": len(specials), "default_vocab_size": size, "version": "v7"}
    settings |= {"num_vocab_tokens": len(tokens), "pattern": TEKKEN_SPLIT}
    write_json(path / "tekken.json", {"audio": audio, "config": settings, "special_tokens": marks, "vocab": ranks})
    return {token: rank for rank, token in enumerate(specials)} | {
        f"token {number}": len(specials) + number for number in range(len(tokens))
    }


def write_llama_tokenizer(path: Path, extra: tuple[str, ...], settings: dict[str, Any]) -> dict[str, int]:
    """Metaspace BPE with byte fallback as Llama 2 has it, `extra` special tokens at the end; returns the ids."""
    specials = ("<unk>", "<s>", "</s>")
    vocab, merges = _train_metaspace(specials)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", vocab["<s>"])]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    _finish(
        path,
        tokenizer,
        specials + extra,
        {
            "add_bos_token": True,
            "add_eos_token": False,
            "bos_token": "<s>",
            "clean_up_tokenization_spaces": False,
            "eos_token": "</s>",
            "legacy": False,
            "model_max_length": 4096,
            "tokenizer_class": "LlamaTokenizer",
            "unk_token": "<unk>",
        }
        | settings,
    )
    return tokenizer.get_vocab(with_added_tokens=True)


def write_gemma_tokenizer(path: Path, settings: dict[str, Any], extra: tuple[str, ...] = ()) -> dict[str, int]:
    """BPE with byte fallback as Gemma has it, turn markers included, `extra` tokens at the end; returns the ids."""
    specials = ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_turn>", "<end_of_turn>")
    vocab, merges = _train_metaspace(specials)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <bos>:1 $B:1", special_tokens=[("<bos>", vocab["<bos>"])]
    )
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    _finish(
        path,
        tokenizer,
        specials + extra,
        {
            "add_bos_token": True,
            "add_eos_token": False,
            "additional_special_tokens": ["<start_of_turn>", "<end_of_turn>"],
            "bos_token": "<bos>",
            "clean_up_tokenization_spaces": False,
            "eos_token": "<eos>",
            "mask_token": "<mask>",
            "model_max_length": 8192,
            "pad_token": "<pad>",
            "tokenizer_class": "GemmaTokenizer",
            "unk_token": "<unk>",
        }
        | settings,
    )
    return tokenizer.get_vocab(with_added_tokens=True)


def _train_metaspace(specials: tuple[str, ...]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    draft = Tokenizer(models.BPE())
    draft.pre_tokenizer = pre_tokenizers.Metaspace()
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=480, special_tokens=[*specials, *fallback], show_progress=False)
    # Only letters of the Latin sentences enter the alphabet: the others must take the byte fallback, as rare ones do.
    draft.train_from_iterator(CORPUS[:-1], trainer)
    return _trained(draft)


def _trained(draft: Tokenizer) -> tuple[dict[str, int], list[tuple[str, str]]]:
    model = json.loads(draft.to_str())["model"]
    vocab = dict(sorted(model["vocab"].items(), key=lambda entry: entry[1]))
    return vocab, [tuple(pair) if isinstance(pair, list) else tuple(pair.split(" ")) for pair in model["merges"]]


def _finish(path: Path, tokenizer: Tokenizer, specials: tuple[str, ...], settings: dict[str, Any]) -> None:
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in specials])
    tokenizer.save(str(path / "tokenizer.json"))
    ids = tokenizer.get_vocab(with_added_tokens=True)
    decoder = {
        str(ids[token]): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
        for token in sorted(specials, key=lambda token: ids[token])
    }
    write_json(path / "tokenizer_config.json", {"added_tokens_decoder": decoder} | settings)
    named = ("bos_token", "eos_token", "pad_token", "unk_token")
    write_json(
        path / "special_tokens_map.json", {name: settings[name] for name in named if settings.get(name) is not None}
    )
