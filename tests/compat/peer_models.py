"""Tiny checkpoints for the models that vLLM's server tests name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tests import tiny, tiny_own_ultravox
from tests.compat import example_repositories, laid, scripted
from tests.lora import adapters
from tests.pool import checkpoints, test_late

# Model of a test -> the tiny checkpoint that stands for it.
FAMILIES: Mapping[str, str] = {
    "Qwen/Qwen2-1.5B-Instruct": "qwen2",
    "Qwen/Qwen2.5-1.5B-Instruct": "qwen2",
    "Qwen/Qwen3-0.6B": "qwen2",
    "Qwen/Qwen3-4B": "qwen2",
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": "qwen2",
    "mistralai/Mistral-7B-Instruct-v0.1": "llama",
    "mistralai/Ministral-8B-Instruct-2410": "llama",
    "HuggingFaceH4/zephyr-7b-beta": "llama",
    "HuggingFaceTB/SmolLM2-135M-Instruct": "llama",
    "hmellor/tiny-random-LlamaForCausalLM": "llama",
    "meta-llama/Llama-3.2-1B": "llama",
    "meta-llama/Llama-3.2-1B-Instruct": "llama",
    "unsloth/llama-3.2-1b-Instruct": "llama",
    "Qwen/Qwen2.5-VL-3B-Instruct": "qwen2_5_vl",
    "llava-hf/llava-1.5-7b-hf": "llava",
    "llava-hf/llava-onevision-qwen2-0.5b-ov-hf": "llava_onevision",
    "HuggingFaceTB/SmolVLM-256M-Instruct": "smolvlm",
    "Qwen/Qwen2.5-Omni-3B": "qwen2_5_omni",
    "google/translategemma-4b-it": "gemma3",
    "google/gemma-4-E2B-it": "gemma4",
    "ibm-granite/granite-4.0-h-tiny": "granitemoehybrid",
    "openai/gpt-oss-20b": "gpt_oss",
    "openai/whisper-large-v3": "whisper",
    "openai/whisper-large-v2": "whisper",
    "openai/whisper-small": "whisper",
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": "llama",
    "JackFram/llama-68m": "llama",
    "openai-community/gpt2": "llama",
    "distilbert/distilgpt2": "llama",
    "meta-llama/llama-2-7b-hf": "llama",
    "Qwen/Qwen3-ASR-0.6B": "qwen3_asr",
    "openai/whisper-large-v3-turbo": "whisper",
}
ULTRAVOX = "fixie-ai/ultravox-v0_5-llama-3_2-1b"
# Models whose tests want reasoning, an answer or a call, and an end -> what a checkpoint in their place says.
SCRIPTED: Mapping[str, tuple[str, ...]] = {
    "Qwen/Qwen3-8B": (
        *("<think>", "\nThe user says something.", "</think>", "\n\nHello! The answer is 56088, ", "or so it seems."),
    ),
    "Qwen/Qwen3-1.7B": (
        *("<think>", "The user asks for the weather, so I call the function.", "</think>", "<tool_call>"),
        '\n{"name": "get_current_weather", ',
        '"arguments": {"city": "Berlin", "country": "Germany", "unit": "fahrenheit"}}\n',
        "</tool_call>",
    ),
}


def _embedder(architecture: str, width: int, positions: int, **changes: Any) -> example_repositories.Make:
    """An encoder of texts with sentence-transformers' modules: the mean of the states, of length 1."""

    def make(folder: Path) -> None:
        # As many ids as the real ones have: tests send some.
        vocabulary = 250_002 if architecture.startswith("XLM") else 30_522
        sizes = {"hidden_size": width, "max_position_embeddings": positions, "vocab_size": vocabulary}
        checkpoints.encoder(folder, architecture, **sizes | changes)
        checkpoints.modules(folder, "Pooling", "Normalize", pooling_mode_mean_tokens=True)

    return make


def _colpali(folder: Path) -> None:
    folder.rmdir()
    test_late.checkpoint("colpali", folder)


def _colbert(folder: Path) -> None:
    """BERT with the layer of late interaction among its weights, as ColBERT's own code writes it."""
    from safetensors.torch import load_file, save_file

    checkpoints.encoder(folder, "BertModel", max_position_embeddings=512)
    file = folder / "model.safetensors"
    drawn = torch.randn(96, 64, generator=torch.Generator().manual_seed(3))
    weights = {f"bert.{name}": value for name, value in load_file(file).items()}
    save_file({**weights, "linear.weight": drawn}, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    checkpoints.write(folder / "config.json", config | {"architectures": ["HF_ColBERT"]})


def _scored(folder: Path) -> None:
    """Qwen2.5-VL with two classes, as vLLM's class of such a checkpoint names the head."""
    from safetensors.torch import load_file, save_file

    example_repositories._of("qwen2_5_vl")(folder)
    file = folder / "model.safetensors"
    weights = load_file(file)
    width = weights[
        "model.norm.weight" if "model.norm.weight" in weights else "model.language_model.norm.weight"
    ].shape[0]
    drawn = torch.randn(2, width, generator=torch.Generator().manual_seed(3))
    save_file({**weights, "score.weight": drawn}, file, metadata={"format": "pt"})


def _wide_qwen3_vl(folder: Path) -> None:
    """Qwen3-VL with the width of the real one's embeddings, which a test sends, features of three layers among them."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    example_repositories._of("qwen3_vl")(folder)
    config = AutoConfig.from_pretrained(folder)
    config.text_config.hidden_size = config.vision_config.out_hidden_size = 2048
    config.text_config.num_hidden_layers = config.vision_config.depth = 4
    config.vision_config.deepstack_visual_indexes = [0, 1, 2]
    torch.manual_seed(3)
    AutoModelForImageTextToText.from_config(config, dtype=torch.float32).save_pretrained(folder)


# Encoders of texts, which example_repositories has under other names, and classifiers.
ENCODERS: Mapping[str, example_repositories.Make] = {
    "BAAI/bge-base-en-v1.5": _embedder("BertModel", 768, 512),
    "BAAI/bge-m3": _embedder("XLMRobertaModel", 64, 8194),
    "BAAI/bge-reranker-base": example_repositories._encoder(
        "XLMRobertaForSequenceClassification", num_labels=1, vocab_size=250_002
    ),
    "jason9693/Qwen2.5-1.5B-apeach": example_repositories._classifier(
        "qwen2",
        "Qwen2ForSequenceClassification",
        pad_token_id=0,
        vocab_size=151_936,
        id2label={"0": "Default", "1": "Spoiled"},
    ),
    "intfloat/multilingual-e5-small": _embedder("XLMRobertaModel", 384, 514, vocab_size=134_000),
    "sentence-transformers/all-MiniLM-L12-v2": _embedder("BertModel", 384, 512),
    "Snowflake/snowflake-arctic-embed-m-v1.5": _embedder("BertModel", 768, 512),
    "google/siglip-so400m-patch14-384": example_repositories._contrastive("siglip"),
    "muziyongshixin/Qwen2.5-VL-7B-for-VideoCls": _scored,
    "tomaarsen/Qwen3-Reranker-0.6B-seq-cls": example_repositories._classifier(
        "qwen2", "Qwen2ForSequenceClassification", num_labels=1, pad_token_id=0
    ),
    "Qwen/Qwen3-VL-2B-Instruct": _wide_qwen3_vl,
    "Qwen/Qwen3-VL-Reranker-2B": example_repositories._judge("qwen3_vl"),
    "vidore/colpali-v1.3-hf": _colpali,
    "answerdotai/answerai-colbert-small-v1": _colbert,
    "mistralai/Voxtral-Mini-4B-Realtime-2602": example_repositories._sound("voxtral_realtime"),
}
_REASONED = ("<think>", "\nOne", " and", " one", " is", " asked", " for.", "</think>", "\n\nIt is 2,", " I think.")
_STATE = '\n{"name": "mcp__computer_use__get_app_state", "arguments": {"app": "Chrome"}}\n'
# File of tests -> the models that say something else in it than in the others.
SPOKEN: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "llm/test_chat.py": {"Qwen/Qwen3-0.6B": _REASONED},
    "test_include_reasoning.py": {"Qwen/Qwen3-0.6B": _REASONED},
    "test_thinking_token_budget.py": {"Qwen/Qwen3-0.6B": _REASONED},
    "test_completion_with_function_calling.py": {"Qwen/Qwen3-0.6B": SCRIPTED["Qwen/Qwen3-1.7B"]},
    "test_namespace_tool_separator.py": {"Qwen/Qwen3-1.7B": ("<tool_call>", _STATE, "</tool_call>")},
}
# Files whose tests send ids of the real vocabularies.
WIDE = frozenset(
    (
        *("test_completion.py", "test_generative_scoring_e2e.py", "test_logprob_token_ids.py"),
        "test_sampling_params_e2e.py",
        "test_logprobs.py",
    )
)
# Files whose tests compare texts of single tokens with the text of an answer, path as in the source.
SPELT = frozenset(("sample/test_logprobs.py", "logits_processors/test_custom_online.py"))
_NUM_IDS = 32_768
# Model of a test -> a template in the form of its own, where the family's has another.
TEMPLATES: Mapping[str, str] = {
    "google/translategemma-4b-it": "{%- for message in messages -%}<start_of_turn>{{ message['role'] }}\n"
    "{%- for part in message['content'] -%}"
    "Translate from {{ part['source_lang_code'] }} to {{ part['target_lang_code'] }}: "
    "{%- if part['type'] == 'image' -%}<start_of_image>{%- else -%}{{ part['text'] }}{%- endif -%}"
    "{%- endfor -%}<end_of_turn>\n{%- endfor -%}<start_of_turn>model\n"
}
# Adapter of a test -> the family of the checkpoint that it adapts.
ADAPTERS: Mapping[str, str] = {
    "typeof/zephyr-7b-beta-lora": "llama",
    "jekunz/smollm-135m-lora-fineweb-faroese": "llama",
    "charent/self_cognition_Alice": "qwen2",
    "Jackmin108/Qwen3-0.6B-Meow-LoRA": "qwen2",
    "Jackmin108/Qwen3-0.6B-Woof-LoRA": "qwen2",
}


def lay(hub: Path, name: str) -> Path | None:
    """The folder of a model in the cache folder `hub`; None if nothing stands for it."""
    family = FAMILIES.get(name)
    if name == ULTRAVOX:
        return _ultravox(hub)
    if family is None and name not in ADAPTERS and name not in SCRIPTED and name not in ENCODERS:
        return example_repositories.lay(hub, name) if example_repositories.known(name) else None
    root = hub / f"models--{name.replace('/', '--')}"
    folder = root / "snapshots" / "main"
    if not folder.is_dir():
        (root / "refs").mkdir(parents=True, exist_ok=True)
        (root / "refs" / "main").write_text("main")
        folder.mkdir(parents=True)
        if name in ENCODERS:
            ENCODERS[name](folder)
            return folder
        if name in SCRIPTED:
            scripted.write(folder, SCRIPTED[name])
            return folder
        if family is None:
            adapters.write(adapters.Adapter(ADAPTERS[name], 1), folder)
            return folder
        example_repositories._of(family, None if family == "whisper" else 32768)(folder)
        if name.startswith("Qwen/Qwen") and "VL" not in name and "Omni" not in name:
            _template(folder, scripted.TEMPLATE)
        if name in TEMPLATES:
            _template(folder, TEMPLATES[name])
    return folder


def _ultravox(hub: Path) -> Path | None:
    """A projector, and the two models that its configuration names, under names that no test uses by themselves."""
    made = example_repositories.lay(hub, ULTRAVOX)
    assert made is not None, "no tiny checkpoint stands for Ultravox"
    path = made / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    for field, part in (("text_model_id", tiny_own_ultravox.TEXT), ("audio_model_id", tiny_own_ultravox.EAR)):
        root = hub / f"models--tests--{part.rpartition('/')[2]}"
        if not root.is_dir():
            (root / "refs").mkdir(parents=True)
            (root / "refs" / "main").write_text("main")
            shutil.copytree(tiny.checkpoint("ultravox") / part, root / "snapshots" / "main")
        config[field] = f"tests/{part.rpartition('/')[2]}"
    path.write_text(json.dumps(config), encoding="utf-8")
    return made


def speak(hub: Path, name: str, pieces: tuple[str, ...]) -> None:
    """Lay a model that says something else; `forget` lets the usual one take its place again."""
    forget(hub, name)
    root = hub / f"models--{name.replace('/', '--')}"
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text("main")
    (root / "snapshots" / "main").mkdir(parents=True)
    scripted.write(root / "snapshots" / "main", pieces)


def widen(hub: Path, name: str) -> bool:
    """Give a tiny Qwen or Llama as many tokens as real ones have, each with a text; `forget` takes it away."""
    if FAMILIES.get(name) not in ("llama", "qwen2"):
        return False
    forget(hub, name)
    folder = lay(hub, name)
    assert folder is not None
    laid._widen(folder, _NUM_IDS)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": _NUM_IDS}), encoding="utf-8")
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    known = {*tokenizer["model"]["vocab"].values(), *(token["id"] for token in tokenizer["added_tokens"])}
    # No merge leads to these: a text never has them.
    tokenizer["model"]["vocab"] |= {f"word{token}": token for token in range(_NUM_IDS) if token not in known}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    return True


def spell(hub: Path, name: str) -> bool:
    """Give a tiny model of text no token that is a part of a letter; `forget` takes it away.

    A random model says such parts all the time, and real ones hardly ever.
    """
    from tokenizers import Tokenizer

    folder = lay(hub, name)
    path = None if folder is None else folder / "tokenizer.json"
    if path is None or not path.is_file():
        return False
    made = Tokenizer.from_file(str(path))
    content = json.loads(path.read_text(encoding="utf-8"))
    pieces = content["model"]["vocab"]
    if content["model"]["type"] != "BPE":
        return False
    texts = {piece: made.decode([token], skip_special_tokens=False) for piece, token in pieces.items()}
    parts = {piece for piece, text in texts.items() if "\ufffd" in text or not text.isprintable()}
    content["model"]["vocab"] = {f"part{token}" if piece in parts else piece: token for piece, token in pieces.items()}
    merges = [each.split(" ") if isinstance(each, str) else each for each in content["model"]["merges"]]
    content["model"]["merges"] = [each for each in merges if parts.isdisjoint((*each, "".join(each)))]
    path.write_text(json.dumps(content), encoding="utf-8")
    return True


def forget(hub: Path, name: str) -> None:
    """Take a model away."""
    shutil.rmtree(hub / f"models--{name.replace('/', '--')}", ignore_errors=True)


def _template(folder: Path, template: str) -> None:
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(config | {"chat_template": template}), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
