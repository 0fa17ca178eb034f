"""jina-embeddings-v3 in its publisher's layout: equal to the description of the model, computed here from the files.

Shapes: T tokens, H numbers of a state, N heads, D numbers of a head, R rank of an adapter.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file

from beheld import LLM, PoolingParams
from beheld.core.errors import ModelError, ParamsError
from tests.pool.checkpoints import drawn, modules, write, write_letters

TASKS = ["retrieval.query", "retrieval.passage", "separation", "classification", "text-matching"]
SIZES = [8, 16, 32, 64]
SMALL: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 8}
TEXTS = [
    "What is in this picture?",
    "A small red circle stands left of a large blue square. " * 2,
    "Hello",
    "hello again",
]
HEADS, LAYERS, RANK, ALPHA, BASE = 4, 3, 4, 2, 20000.0


def lay(folder: Path, **changes: Any) -> Path:
    """Write a tiny checkpoint with the files, names and entries of jinaai/jina-embeddings-v3, and drawn weights."""
    folder.mkdir(parents=True, exist_ok=True)
    count, width, inner = write_letters(folder, bars=True), 64, 96
    noise = torch.Generator().manual_seed(11)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=noise)

    weights: dict[str, torch.Tensor] = {}

    def adapted(name: str, out: int, inside: int, embeds: bool = False) -> None:
        stored = f"roberta.{name}.parametrizations.weight"
        weights[f"{stored}.original"] = random(out, inside) * (1.0 if embeds else 1.5 / inside**0.5)
        # Rows by columns of a matrix are the other way round for embeddings.
        first, second = ((out, RANK), (RANK, inside)) if embeds else ((RANK, inside), (out, RANK))
        weights[f"{stored}.0.lora_A"] = 0.3 * random(len(TASKS), *first)
        weights[f"{stored}.0.lora_B"] = 0.3 * random(len(TASKS), *second)
        if not embeds:
            weights[f"roberta.{name}.bias"] = 0.2 * random(out)

    def norm(name: str) -> None:
        weights[f"roberta.{name}.weight"] = 1 + 0.2 * random(width)
        weights[f"roberta.{name}.bias"] = 0.2 * random(width)

    adapted("embeddings.word_embeddings", count, width, embeds=True)
    adapted("embeddings.token_type_embeddings", 1, width, embeds=True)
    norm("emb_ln")
    for layer in range(LAYERS):
        place = f"encoder.layers.{layer}"
        adapted(f"{place}.mixer.Wqkv", 3 * width, width)
        adapted(f"{place}.mixer.out_proj", width, width)
        adapted(f"{place}.mlp.fc1", inner, width)
        adapted(f"{place}.mlp.fc2", width, inner)
        norm(f"{place}.norm1")
        norm(f"{place}.norm2")
    adapted("pooler.dense", width, width)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["XLMRobertaModel"],
        "auto_map": {"AutoModel": "jinaai/xlm-roberta-flash-implementation--modeling_lora.XLMRobertaLoRA"},
        "attention_probs_dropout_prob": 0.1,
        "bos_token_id": 2,
        "eos_token_id": 3,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1,
        "hidden_size": width,
        "intermediate_size": inner,
        "layer_norm_eps": 1e-5,
        "load_trained_adapters": True,
        "lora_adaptations": TASKS,
        "lora_alpha": ALPHA,
        "lora_dropout_p": 0.0,
        "lora_main_params_trainable": False,
        "lora_rank": RANK,
        "matryoshka_dimensions": SIZES,
        "max_position_embeddings": 194,
        "model_type": "xlm-roberta",
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "pad_token_id": 1,
        "position_embedding_type": "rotary",
        "rotary_emb_base": BASE,
        "task_instructions": dict.fromkeys(TASKS, ""),
        "torch_dtype": "float32",
        "truncate_dim": None,
        "type_vocab_size": 1,
        "use_flash_attn": True,
        "vocab_size": count,
    }
    write(folder / "config.json", config | changes)
    modules(folder, "Pooling", "Normalize", pooling_mode_mean_tokens=True, pooling_mode_cls_token=False)
    # Their first module is a class of the repository's.
    entries = json.loads((folder / "modules.json").read_text(encoding="utf-8"))
    entries[0] |= {"type": "custom_st.Transformer", "kwargs": ["task"]}
    write(folder / "modules.json", entries)
    return folder


def states(folder: Path, ids: list[int], task: int | None) -> torch.Tensor:
    """Return the last states (T, H) of a text's tokens: post-norm layers, whose heads rotate their two halves."""
    stored = load_file(folder / "model.safetensors")

    def weight(name: str) -> torch.Tensor:
        place = f"roberta.{name}.parametrizations.weight"
        first, second = (stored[f"{place}.0.lora_{letter}"][task or 0] for letter in "AB")
        change = first @ second if "embeddings" in name else second @ first
        return stored[f"{place}.original"] + (0 if task is None else change * ALPHA / RANK)

    def linear(name: str, x_TH: torch.Tensor) -> torch.Tensor:
        return x_TH @ weight(name).T + stored[f"roberta.{name}.bias"]

    def normed(name: str, x_TH: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x_TH, x_TH.shape[-1:], *(stored[f"roberta.{name}.{part}"] for part in ("weight", "bias")))

    x_TH = normed("emb_ln", weight("embeddings.word_embeddings")[ids] + weight("embeddings.token_type_embeddings")[0])
    half = x_TH.shape[1] // HEADS // 2
    angles_TD = torch.arange(len(ids))[:, None] * BASE ** (-torch.arange(half) / half)

    def turned(x_TND: torch.Tensor) -> torch.Tensor:
        a, b = x_TND.chunk(2, dim=-1)
        cos, sin = angles_TD.cos()[:, None], angles_TD.sin()[:, None]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    for layer in range(LAYERS):
        place = f"encoder.layers.{layer}"
        q, k, v = linear(f"{place}.mixer.Wqkv", x_TH).chunk(3, dim=-1)
        q, k, v = (each.unflatten(-1, (HEADS, -1)) for each in (q, k, v))
        scores_NTT = torch.einsum("tnd,snd->nts", turned(q), turned(k)) / (2 * half) ** 0.5
        seen_TH = torch.einsum("nts,snd->tnd", scores_NTT.softmax(-1), v).flatten(1)
        x_TH = normed(f"{place}.norm1", x_TH + linear(f"{place}.mixer.out_proj", seen_TH))
        inner = F.gelu(linear(f"{place}.mlp.fc1", x_TH))
        x_TH = normed(f"{place}.norm2", x_TH + linear(f"{place}.mlp.fc2", inner))
    return x_TH


def test_vectors_are_those_of_the_task_that_is_merged(tmp_path: Path) -> None:
    folder = lay(tmp_path / "m")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    prompts = [tokenizer(text, truncation=False, padding=False)["input_ids"] for text in TEXTS]
    merged = [states(folder, ids, TASKS.index("text-matching")) for ids in prompts]
    with LLM(str(folder), runner="pooling", trust_remote_code=True, **SMALL) as llm:
        found = torch.tensor([output.outputs.embedding for output in llm.embed(TEXTS, use_tqdm=False)])
        every = llm.encode(TEXTS, PoolingParams(normalize=False), pooling_task="token_embed", use_tqdm=False)
        short = llm.embed(TEXTS, pooling_params=PoolingParams(dimensions=16), use_tqdm=False)
        with pytest.raises(ParamsError, match="8, 16, 32, 64"):
            llm.embed(TEXTS, pooling_params=PoolingParams(dimensions=10), use_tqdm=False)
    for output, wanted in zip(every, merged, strict=True):
        torch.testing.assert_close(output.outputs.data, wanted, atol=5e-5, rtol=1e-4)
    means = torch.stack([wanted.mean(0) for wanted in merged])
    torch.testing.assert_close(found, F.normalize(means, dim=-1), atol=1e-5, rtol=1e-4)
    cut = torch.tensor([output.outputs.embedding for output in short])
    torch.testing.assert_close(cut, F.normalize(means[:, :16], dim=-1), atol=1e-5, rtol=1e-4)
    # Another task's adapter, or none, gives another vector.
    for other in (0, None):
        away = states(folder, prompts[0], other).mean(0)
        assert float(F.cosine_similarity(away, means[0], dim=0)) < 0.99


def test_without_adapters(tmp_path: Path) -> None:
    """As transformers stores the model."""
    config = transformers.JinaEmbeddingsV3Config(
        architectures=["JinaEmbeddingsV3Model"],
        **{"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": HEADS, "num_hidden_layers": LAYERS},
        **{"max_position_embeddings": 194, "vocab_size": write_letters(tmp_path, bars=True), "pad_token_id": 0},
    )
    model = transformers.JinaEmbeddingsV3Model._from_config(config, dtype=torch.float32).eval()
    drawn(model)
    model.save_pretrained(tmp_path)
    with LLM(str(tmp_path), **SMALL) as llm:
        every = llm.encode(TEXTS, PoolingParams(normalize=False), pooling_task="token_embed", use_tqdm=False)
    for output in every:
        with torch.no_grad():
            wanted = model(torch.tensor([output.prompt_token_ids])).last_hidden_state[0]
        torch.testing.assert_close(output.outputs.data, wanted, atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lora_adaptations": TASKS[:2]}, "none for text-matching"),
        ({"lora_adaptations": [*TASKS[:4], "a", "text-matching"]}, "The adapter of roberta.embeddings"),
        ({"architectures": ["XLMRobertaForMaskedLM"]}, "XLMRobertaForMaskedLM with 'rotary' positions is not built"),
        ({"rotary_emb_dim": 8}, "rotates 8 of the 16 numbers"),
    ],
)
def test_what_is_not_read_is_named(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    folder = lay(tmp_path / "m", **changes)
    with pytest.raises(ModelError, match=words):
        LLM(str(folder), **SMALL)
