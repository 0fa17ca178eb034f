"""A checkpoint that says one text whatever it is asked: the token that follows depends on the last token alone.

    last token  -> embedding -> (layers that add nothing) -> norm -> head: the row of the next token is the embedding's

The text's pieces are tokens of their own, so that each occurs once and has one successor.
"""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests import tiny
from tests import tiny_text as text

WIDTH = 256
# Templates of real models have what clients ask for, and those of the tiny checkpoints have not: reasoning, tools.
TEMPLATE = """{%- if tools -%}{{- '<|im_start|>system\\n<tools>' -}}
{%- for tool in tools -%}{{- tool | tojson -}}{%- endfor -%}
{{- '</tools> Call one as <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>\\n' -}}{%- endif -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.content is string -%}{{- message.content -}}
{%- else -%}{%- for part in message.content or [] if part.text -%}{{- part.text -}}{%- endfor -%}{%- endif -%}
{%- for call in message.tool_calls or [] -%}
{{- '<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' -}}{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}
{%- if enable_thinking is defined and enable_thinking is false -%}{{- '<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}
{%- endif -%}"""
# What one of vLLM's example clients wants to be called, after some reasoning.
CALL = (
    "<think>",
    "The user asks for the weather, so I call the function.",
    "</think>",
    "<tool_call>",
    '\n{"name": "get_current_weather", "arguments": {"city": "Dallas", "state": "TX", "unit": "fahrenheit"}}\n',
    "</tool_call>",
)
# What vLLM's example of tools wants of Mistral 7B: a token that prompts end with -> what it says then.
MISTRAL = {
    "[/INST]": (
        "[TOOL_CALLS]",
        '[{"name": "get_current_weather", "arguments": {"city": "Dallas", "state": "TX", "unit": "fahrenheit"}}]',
    ),
    "[/TOOL_RESULTS]": ("It is 85 degrees fahrenheit in Dallas.",),
}
MARKS = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]")
MARKS += ("[/TOOL_RESULTS]", "[TOOL_CALLS]", "<pad>")


def write_mistral(folder: Path, answers: Mapping[str, Sequence[str]]) -> None:
    """Write a model in Mistral's own layout, of the third version, that answers by the last token of a prompt.

    Its files stand next to those of transformers' layout where `folder` has them.
    """
    import torch
    from safetensors.torch import save_file

    ids = dict(text.write_tekken(folder, MARKS, {}))
    stored = json.loads((folder / "tekken.json").read_text(encoding="utf-8"))
    for piece in (each for pieces in answers.values() for each in pieces if each not in ids):
        ids[piece] = len(ids)
        entry = {"token_bytes": base64.b64encode(piece.encode()).decode(), "token_str": piece}
        stored["vocab"].append({"rank": len(stored["vocab"]), **entry})
    sizes = {"default_vocab_size": len(ids), "num_vocab_tokens": len(stored["vocab"])}
    stored["config"] |= {"version": "v3", **sizes}
    text.write_json(folder / "tekken.json", stored)
    params: dict[str, Any] = {
        **{"dim": WIDTH, "head_dim": 64, "hidden_dim": 32, "n_heads": 4, "n_kv_heads": 4, "n_layers": 1},
        **{"norm_eps": 1e-5, "rope_theta": 1e6, "vocab_size": len(ids), "max_position_embeddings": 32768},
    }
    text.write_json(folder / "params.json", params)
    torch.manual_seed(0)
    embeds_VH = torch.nn.functional.normalize(torch.randn(len(ids), WIDTH), dim=-1)
    head_VH = torch.zeros(len(ids), WIDTH)
    for last, pieces in answers.items():
        for before, following in zip([last, *pieces], [*pieces, "</s>"], strict=True):
            head_VH[ids[following]] += 4.0 * embeds_VH[ids[before]]
    square = torch.zeros(WIDTH, WIDTH)
    weights = {
        "tok_embeddings.weight": embeds_VH,
        "norm.weight": torch.ones(WIDTH),
        "output.weight": head_VH,
        "layers.0.attention_norm.weight": torch.ones(WIDTH),
        "layers.0.ffn_norm.weight": torch.ones(WIDTH),
        **{f"layers.0.attention.w{letter}.weight": square.clone() for letter in "qkvo"},
        "layers.0.feed_forward.w1.weight": torch.zeros(32, WIDTH),
        "layers.0.feed_forward.w2.weight": torch.zeros(WIDTH, 32),
        "layers.0.feed_forward.w3.weight": torch.zeros(32, WIDTH),
    }
    save_file(weights, folder / "consolidated.safetensors")


def write(folder: Path, pieces: Sequence[str]) -> None:
    """Write a Qwen2 that answers `pieces` to each prompt that ends with a line feed into the empty `folder`."""
    import torch
    import transformers

    for file in tiny.checkpoint("qwen2").iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(list(pieces))
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    ids = tokenizer.convert_tokens_to_ids(list(pieces))
    (line,) = tokenizer.encode("\n", add_special_tokens=False)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config |= {
        "vocab_size": len(tokenizer),
        "hidden_size": WIDTH,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "layer_types": ["full_attention"],
        "tie_word_embeddings": False,
        "max_position_embeddings": 32768,
    }
    config.pop("head_dim", None)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    torch.manual_seed(0)
    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**config)).float()
    with torch.no_grad():
        embeds_VH = torch.nn.functional.normalize(torch.randn(len(tokenizer), WIDTH), dim=-1)
        model.model.embed_tokens.weight.copy_(embeds_VH)
        model.model.norm.weight.fill_(1.0)
        model.lm_head.weight.zero_()
        for last, following in zip([line, *ids], [*ids, tokenizer.eos_token_id], strict=True):
            model.lm_head.weight[following] += 4.0 * embeds_VH[last]
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    model.save_pretrained(folder)
