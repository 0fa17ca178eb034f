"""Tiny pooling checkpoints, laid out as the real ones: made of other tiny checkpoints, or drawn from a seed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests import tiny

ST = "sentence_transformers.models."


def write(path: Path, value: Any) -> None:
    """Write JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")


def copied(name: str, folder: Path, **changes: Any) -> Path:
    """A copy of the tiny checkpoint `name` with these entries in its config.json."""
    shutil.copytree(tiny.checkpoint(name), folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8")) | changes
    write(folder / "config.json", config)
    return folder


def modules(folder: Path, *names: str, **mode: Any) -> Path:
    """Write sentence-transformers' modules: Transformer, those in `names`, in this order."""
    entries = [{"idx": 0, "name": "0", "path": "", "type": f"{ST}Transformer"}]
    for number, name in enumerate(names, 1):
        entries.append({"idx": number, "name": str(number), "path": f"{number}_{name}", "type": f"{ST}{name}"})
    write(folder / "modules.json", entries)
    if "Pooling" in names:
        write(folder / f"{1 + names.index('Pooling')}_Pooling" / "config.json", mode)
    return folder


def dense(folder: Path, number: int, width_in: int, width_out: int) -> torch.Tensor:
    """Write a linear layer after pooling; returns its weight."""
    weight = torch.randn(width_out, width_in, generator=torch.Generator().manual_seed(number))
    entry = {"in_features": width_in, "out_features": width_out, "bias": False}
    where = folder / f"{number}_Dense"
    write(where / "config.json", entry | {"activation_function": "torch.nn.modules.activation.Tanh"})
    save_file({"linear.weight": weight}, where / "model.safetensors")
    return weight


def without_head(folder: Path) -> Path:
    """Rename the weights as an embedder's are stored: those of the bare model, without the generating head."""
    file = folder / "model.safetensors"
    kept = {name.removeprefix("model."): value for name, value in load_file(file).items() if "lm_head" not in name}
    save_file(kept, file, metadata={"format": "pt"})
    return folder


def classifier(name: str, folder: Path, architecture: str, **changes: Any) -> Path:
    """A checkpoint of a class with a head of classes, of the same shape and tokenizer as the tiny `name`."""
    copied(name, folder, architectures=[architecture], **changes)
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = getattr(transformers, architecture)._from_config(config, dtype=torch.float32)
        drawn(model)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder)
    return folder


def drawn(model: Any) -> None:
    """Draw weights that are far from their neutral values."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn_like(weight)
            if weight.ndim < 2:
                weight.copy_(0.2 * noise + (1 if "orm" in name and name.endswith(".weight") else 0))
            else:
                weight.copy_(1.5 / weight.shape[-1] ** 0.5 * noise)


def encoder(folder: Path, architecture: str, **changes: Any) -> Path:
    """A checkpoint of an encoder: its tokenizer knows letters, its weights are drawn."""
    folder.mkdir(parents=True, exist_ok=True)
    kind = getattr(transformers, architecture)
    tokens = write_letters(folder, "Roberta" in architecture)
    shape = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "max_position_embeddings": 130,
        "num_attention_heads": 4,
        "num_hidden_layers": 3,
        "pad_token_id": 0,
        "vocab_size": tokens,
    }
    config = kind.config_class(architectures=[architecture], **shape | changes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = kind._from_config(config, dtype=torch.float32)
        drawn(model)
    model.save_pretrained(folder)
    return folder


def write_letters(folder: Path, bars: bool) -> int:
    """Write a tokenizer of letters with BERT's specials, or with RoBERTa's two separators; returns how many ids."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    letters = "abcdefghijklmnopqrstuvwxyz0123456789.,?!"
    specials = ["<pad>", "<unk>", "<s>", "</s>"] if bars else ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    vocab = {token: number for number, token in enumerate([*specials, *letters, *(f"##{each}" for each in letters)])}
    made = Tokenizer(models.WordPiece(vocab, unk_token=specials[1]))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    first, last = specials[2:]
    middle = f"{last} {last}" if bars else last
    pair = f"{first} $A {middle} $B:{0 if bars else 1} {last}" + ("" if bars else ":1")
    made.post_processor = processors.TemplateProcessing(
        single=f"{first} $A {last}", pair=pair, special_tokens=[(first, 2), (last, 3)]
    )
    made.add_special_tokens(specials)
    # As the published MiniLM has it: texts would be cut and filled up.
    made.enable_truncation(20)
    made.enable_padding(length=20)
    made.save(str(folder / "tokenizer.json"))
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token"), specials, strict=True))
    given = ["input_ids", "attention_mask", *([] if bars else ["token_type_ids"])]
    settings = names | {"tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": given}
    write(folder / "tokenizer_config.json", settings)
    return len(vocab)
