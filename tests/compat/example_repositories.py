"""The repositories that vLLM's offline examples and pages of the documentation name, laid as tiny checkpoints."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests import tiny
from tests import tiny_text as text
from tests.compat import laid

Make = Callable[[Path], object]


def _of(family: str, positions: int | None = 32768) -> Make:
    def make(folder: Path) -> None:
        for file in filter(Path.is_file, tiny.checkpoint(family).iterdir()):
            shutil.copy(file, folder)
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if positions is not None:
            inner = config.get("thinker_config", config)
            inner.get("text_config", inner.get("llm_config", inner))["max_position_embeddings"] = positions
        text.write_json(folder / "config.json", config)

    return make


def _opt(folder: Path) -> None:
    ids = text.write_llama_tokenizer(folder, ("<pad>",), {"tokenizer_class": "LlamaTokenizer", "pad_token": "<pad>"})
    config = {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "hidden_size": 64,
        "word_embed_proj_dim": 64,
        "ffn_dim": 96,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "vocab_size": tiny.VOCAB,
        "max_position_embeddings": 2048,
        "bos_token_id": ids["<s>"],
        "eos_token_id": ids["</s>"],
        "pad_token_id": ids["<pad>"],
        "torch_dtype": "float32",
    }
    tiny._write_model(folder, config, {"eos_token_id": ids["</s>"]}, ids, seed=9)


# Messages of texts and images; IMAGE stands for an image's text.
_CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}IMAGE{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _census(kind: str, positions: int = 32768) -> Make:
    """A checkpoint of a type of the census."""

    def make(folder: Path) -> None:
        from tests import census_media

        census_media.make(kind, census_media.RECIPES[kind], folder)
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config["text_config"]["max_position_embeddings"] = positions
        text.write_json(folder / "config.json", config)
        written = _CHAT.replace("IMAGE", census_media.RECIPES[kind].image)
        (folder / "chat_template.jinja").write_text(written, encoding="utf-8")

    return make


def _sound(kind: str) -> Make:
    """A checkpoint of a type of the census that hears."""

    def make(folder: Path) -> None:
        from tests import census_media, census_sound

        census_media.make(kind, census_sound.RECIPES[kind], folder)

    return make


def _encoder(architecture: str, **changes: Any) -> Make:
    from tests.pool import checkpoints

    return lambda folder: checkpoints.encoder(folder, architecture, **changes)


def _classifier(family: str, architecture: str, **changes: Any) -> Make:
    from tests.pool import checkpoints

    def make(folder: Path) -> None:
        folder.rmdir()
        checkpoints.classifier(family, folder, architecture, **changes)

    return make


def _quantized(method: str) -> Make:
    """The tiny Llama as AWQ or GPTQ stores it."""

    def make(folder: Path) -> None:
        from tests.quant import stored_forms, test_awq, test_gptq

        forms = {
            "awq": (test_awq.ENTRY, stored_forms.awq(16)),
            "gptq": (test_gptq.ENTRY | {"bits": 4, "group_size": 16}, stored_forms.gptq(4, 16, 1, act_order=True)),
        }
        folder.rmdir()
        stored_forms.write(tiny.checkpoint("llama"), folder, *forms[method])

    return make


def _judge(family: str) -> Make:
    """The tiny checkpoint with the words of a reranker as tokens, in place of two rare letters."""

    def make(folder: Path) -> None:
        _of(family)(folder)
        file = folder / "tokenizer.json"
        content = json.loads(file.read_text(encoding="utf-8"))
        vocabulary = content["model"]["vocab"]
        for letter, word in (("~", "yes"), ("^", "no")):
            vocabulary[word] = vocabulary.pop(letter)
        text.write_json(file, content)

    return make


def _with_code(family: str, module: str, name: str) -> Make:
    """The tiny checkpoint, with a class where the repository has its own tokenizer's code, which scripts run."""

    def make(folder: Path) -> None:
        from beheld.checkpoint.info import read_info
        from beheld.checkpoint.resolve import resolve
        from beheld.core.config import EngineArgs
        from beheld.inputs.prompt.tokenizer import load_tokenizer

        _of(family)(folder)
        args = EngineArgs(model=str(folder))
        load_tokenizer(read_info(resolve(args), args), args).backend_tokenizer.save(str(folder / "tokenizer.json"))
        code = (
            f"from transformers import PreTrainedTokenizerFast\n\n\nclass {name}(PreTrainedTokenizerFast):\n    pass\n"
        )
        (folder / f"{module}.py").write_text(code, encoding="utf-8")

    return make


def _rotary(folder: Path) -> None:
    from tests.pool import test_rotary

    test_rotary.lay(folder, matryoshka_dimensions=[32, 64])


def _both_layouts(folder: Path) -> None:
    """The tiny Mistral in transformers' layout, and a model that calls the example's tool in Mistral's own."""
    from tests.compat import scripted

    _of("mistral")(folder)
    scripted.write_mistral(folder, scripted.MISTRAL)


def _with_parts(family: str) -> Make:
    """The tiny checkpoint with the checkpoints of its parts, which its configuration names, in folders of its own."""

    def make(folder: Path) -> None:
        shutil.copytree(tiny.checkpoint(family), folder, dirs_exist_ok=True)

    return make


def _named(family: str, architecture: str) -> Make:
    """The tiny checkpoint as one of another class."""
    from tests.pool import checkpoints

    def make(folder: Path) -> None:
        folder.rmdir()
        checkpoints.copied(family, folder, architectures=[architecture])

    return make


def _aligner(folder: Path) -> None:
    from tests.families import test_qwen3_asr

    text.write_json(folder / "config.json", test_qwen3_asr.ALIGNER)


def _reranker(folder: Path) -> None:
    from tests.pool import test_vision_rerankers

    folder.rmdir()
    test_vision_rerankers.lay_jina(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config.get("text_config", config)["max_position_embeddings"] = 32768
    text.write_json(folder / "config.json", config)


def _class_adapter(folder: Path) -> None:
    from tests.lora import adapters

    adapters.write(adapters.Adapter("qwen2", 1), folder)


def _rewards(folder: Path) -> None:
    from tests.families import test_internlm2

    folder.rmdir()
    test_internlm2.lay(folder, biased=False, head=True)


def _contrastive(kind: str) -> Make:
    from tests.pool import test_contrastive

    def make(folder: Path) -> None:
        folder.rmdir()
        test_contrastive.checkpoint(test_contrastive.FAMILIES[kind], folder)

    return make


def _late(kind: str) -> Make:
    from tests.pool import test_late

    def make(folder: Path) -> None:
        folder.rmdir()
        test_late.checkpoint(kind, folder)

    return make


def _adapter(folder: Path) -> None:
    from tests.lora import adapters

    adapters.write(adapters.Adapter("llama", 1), folder)


_LLAMAS = [
    "huggyllama/llama-7b",
    "lmsys/longchat-13b-16k",
    "meta-llama/Llama-2-13b-chat-hf",
    "meta-llama/Llama-3.1-8B",
    "meta-llama/Llama-3.1-8B-Instruct",
    "meta-llama/Llama-3.2-1B-Instruct",
    "meta-llama/Llama-3.2-3B-Instruct",
    "meta-llama/Meta-Llama-3.1-8B-Instruct",
]
_ADAPTERS = [
    "jashing/tinyllama-colorist-lora",
    "jeeejeee/llama32-3b-text2sql-spider",
    "timdettmers/qlora-flan-7b",
    "yard1/llama-2-7b-sql-lora-test",
]

REPOSITORIES: Mapping[str, Make] = {
    **dict.fromkeys(_LLAMAS, _of("llama")),
    **dict.fromkeys(_ADAPTERS, _adapter),
    "AmirMohseni/skywork-qwen3-0.6b-reward-lora": _class_adapter,
    "allenai/Molmo2-8B": _of("molmo2"),
    "BAAI/bge-m3": _encoder("XLMRobertaModel"),
    "BAAI/bge-reranker-v2-gemma": _of("gemma2"),
    "BAAI/bge-reranker-v2-m3": _encoder("XLMRobertaForSequenceClassification", num_labels=1),
    "boltuix/NeuroBERT-NER": _encoder("BertForTokenClassification", num_labels=5),
    "deepseek-ai/DeepSeek-OCR-2": _census("deepseek_ocr2"),
    "facebook/opt-125m": _opt,
    "fixie-ai/ultravox-v0_5-llama-3_2-1b": _with_parts("ultravox"),
    "google/gemma-4-31B-it": _of("gemma4"),
    "google/siglip-base-patch16-224": _contrastive("siglip"),
    "ibm-granite/granite-vision-4.1-4b": _census("granite4_vision"),
    "ibm-research/PowerMoE-3b": _of("granitemoehybrid"),
    "internlm/Intern-S1-mini": _with_code("interns1", "tokenization_interns1", "InternS1Tokenizer"),
    "internlm/internlm2-1_8b-reward": _rewards,
    "intfloat/e5-small": _encoder("BertModel"),
    "intfloat/multilingual-e5-small": _encoder("BertModel", max_position_embeddings=512),
    "jason9693/Qwen2.5-1.5B-apeach": _classifier("qwen2", "Qwen2ForSequenceClassification", pad_token_id=0),
    "jinaai/jina-embeddings-v3": _rotary,
    "jinaai/jina-embeddings-v4-vllm-text-matching": _of("qwen2_5_vl"),
    "jinaai/jina-reranker-m0": _reranker,
    "jinaai/jina-reranker-v3": _named("qwen2", "JinaForRanking"),
    "LGAI-EXAONE/EXAONE-4.5-33B": _census("exaone4_5"),
    "lightonai/LightOnOCR-1B": _of("lighton_ocr"),
    "LiquidAI/LFM2-VL-450M": _of("lfm2_vl"),
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": _of("llama4", 1_048_576),
    "microsoft/Phi-mini-MoE-instruct": _of("llama"),
    "mistralai/Mistral-7B-Instruct-v0.3": _both_layouts,
    "mistralai/Mistral-Small-3.1-24B-Instruct-2503": _of("mistral3"),
    "mistralai/Voxtral-Mini-3B-2507": _of("voxtral"),
    "moonshotai/Kimi-K2.5": _census("kimi_k25"),
    "naver-hyperclovax/HyperCLOVAX-SEED-Vision-Instruct-3B": _of("hyperclovax_vlm"),
    "Open-Bee/Bee-8B-RL": _of("bee"),
    "openai/clip-vit-base-patch32": _contrastive("clip"),
    "openai/whisper-large-v3-turbo": lambda folder: laid._fill(
        folder, laid.Laid("whisper", positions=None, config={"max_target_positions": 448})
    ),
    "OpenGVLab/InternVL2-2B": _with_code("internvl_chat", "tokenization_internlm2", "InternLM2Tokenizer"),
    "OpenGVLab/InternVL3-2B": _of("internvl_chat_qwen2"),
    "PaddlePaddle/PaddleOCR-VL": _of("paddleocr_vl"),
    "Qwen/Qwen2.5-3B-Instruct": _of("qwen2"),
    "Qwen/Qwen2.5-7B-Instruct-1M": _of("qwen2", 1_048_576),
    "Qwen/Qwen2.5-Omni-7B": _of("qwen2_5_omni"),
    "Qwen/Qwen3-0.6B": _of("qwen2"),
    "Qwen/Qwen3-ForcedAligner-0.6B": _aligner,
    "Qwen/Qwen3-Omni-30B-A3B-Instruct": _of("qwen3_omni_moe"),
    "Qwen/Qwen3-Reranker-0.6B": _judge("qwen2"),
    "Qwen/Qwen3-VL-30B-A3B-Instruct": _of("qwen3_vl_moe"),
    "Qwen/Qwen3-VL-4B-Instruct": _of("qwen3_vl"),
    "Qwen/Qwen3-VL-Reranker-2B": _judge("qwen3_vl"),
    "Qwen/Qwen3.5-35B-A3B": _of("qwen3_5_moe"),
    "Qwen/Qwen3.5-4B": _of("qwen3_5"),
    "royokong/e5-v": _of("llava_next"),
    "Skywork/Skywork-Reward-V2-Qwen3-0.6B": _classifier(
        "qwen2", "Qwen2ForSequenceClassification", id2label={0: "score"}, label2id={"score": 0}, pad_token_id=0
    ),
    "TheBloke/TinyLlama-1.1B-Chat-v0.3-AWQ": _quantized("awq"),
    "TheBloke/TinyLlama-1.1B-Chat-v0.3-GPTQ": _quantized("gptq"),
    "TIGER-Lab/VLM2Vec-Full": _of("phi3_v"),
    "TIGER-Lab/VLM2Vec-Qwen2VL-2B": _of("qwen2_vl"),
    "vidore/colqwen2-v1.0-hf": _late("colqwen2"),
    "zai-org/GLM-OCR": _of("glm_ocr"),
}


def lay(hub: Path, name: str) -> Path:
    """The folder of a repository in the cache folder `hub`, laid if it is not there yet."""
    if name in laid.REPOSITORIES and name not in REPOSITORIES:
        for further in laid.BESIDE.get(name, ()):
            laid.repository(hub, further)
        return laid.repository(hub, name)
    root = hub / f"models--{name.replace('/', '--')}"
    folder = root / "snapshots" / laid.REVISION
    if not folder.is_dir():
        (root / "refs").mkdir(parents=True, exist_ok=True)
        (root / "refs" / "main").write_text(laid.REVISION)
        folder.mkdir(parents=True)
        REPOSITORIES[name](folder)
    return folder


def known(name: str) -> bool:
    """Whether there is a tiny checkpoint for a repository."""
    return name in REPOSITORIES or name in laid.REPOSITORIES
