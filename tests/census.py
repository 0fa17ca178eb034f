"""Says of every type that the installed transformers defines whether it runs here, is refused, or is broken.

python -m tests.census [TYPE ... | PART/PARTS]

A text type gets a tiny random checkpoint, made of its configuration class with small sizes. One that sees or hears is
made of its recipe (census_media.py). It *runs* if the engine's greedy answers equal those of transformers' generate():
with prompts cut into steps, with prompts that are found in the cache, and with so few blocks that sequences preempt
each other. It is *refused* if the engine says why it cannot run; all else is *broken*, and then the exit status is 1. A
type whose checkpoint the oracle has is not compared again. What has neither recipe nor refusal, and what transformers
itself cannot make or run in a small size, is *untried*.
"""

from __future__ import annotations

import dataclasses
import importlib
import logging
import multiprocessing
import resource
import signal
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from beheld.checkpoint.info import read_info
from beheld.core.config import EngineArgs
from beheld.core.errors import BeheldError
from beheld.families import registry
from tests import census_media, census_sound, tiny
from tests import tiny_text as text

# Processor time of one type, and how many times as long it may take on a busy machine.
_MOST_S = 120
_MOST_WAITS = 10
_ANSWER_TOKENS = 8
# The prompts' lengths: within a step, several steps, beyond every window and chunk.
_LENGTHS = (1, 5, 23, 40, 61)
# Types that run at least, of all.
LEAST_MEDIA, LEAST_TEXT = 110, 90
_TOLERANCE = 1e-3
_BLOCK = 8
_LAYERS = 4
_MOST_NUMBERS = 1 << 26

# The names of sizes in configurations, and small values that fit each other.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embedding_size", "embed_dim", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "inner_dim", "dim_ff"), 96),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), _LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "max_sequence_length"), 1024),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("shared_intermediate_size", "moe_shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_top_k", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "num_shared_experts", "first_k_dense_replace"), 1),
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "window_size", "attention_window_size"), 24),
    **dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size"), 16),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "rotary_dim"), 16),
    "head_dim": 16,
    "kv_lora_rank": 32,
    "mamba_d_head": 16,
    "mamba_n_heads": 8,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "vocab_size": tiny.VOCAB,
    "zero_expert_num": 2,
}
RECIPES = census_media.RECIPES | census_sound.RECIPES
IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
# Of classes whose sizes depend on each other in another way.
PECULIAR: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"layer_group_size": 2},
    "bamba": {"attn_layer_indices": [1, 3]},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"] * (_LAYERS // 2),
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in ("sliding_attention", "full_attention")
        },
    },
    # As its checkpoint has them; transformers gives rope_theta no value of its own.
    "dbrx": {
        "attn_config": {"clip_qkv": 8.0, "kv_n_heads": 2, "rope_theta": 500000.0},
        "ffn_config": {"ffn_hidden_size": 96, "hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "falcon_h1": {"mamba_d_ssm": 128},
    "gemma3n_text": {
        "hidden_size_per_layer_input": 16,
        "layer_types": ["sliding_attention", "full_attention"] * (_LAYERS // 2),
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": tiny.VOCAB,
    },
    "gemma4_text": {
        "hidden_size_per_layer_input": 16,
        "layer_types": ["sliding_attention", "full_attention"] * (_LAYERS // 2),
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": tiny.VOCAB,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], _LAYERS // 2]]},
    "glm_moe_dsa": {"indexer_types": ["full", "shared"] * (_LAYERS // 2)},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * (_LAYERS // 2)},
    "kimi_linear": {
        "layer_types": ["linear_attention", "full_attention"] * (_LAYERS // 2),
        "linear_head_dim": 16,
        "linear_num_heads": 4,
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * (_LAYERS // 2)},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "zamba2": {
        "adapter_rank": 8,
        "head_dim": 32,
        "layers_block_type": ["mamba", "hybrid"] * (_LAYERS // 2),
        "mamba_ngroups": 2,
        "num_key_value_heads": 4,
        "num_mem_blocks": 1,
        "use_mem_rope": True,
        "use_shared_attention_adapter": True,
    },
    "minimax": {"sliding_window": None},
    "rwkv": {"rescale_every": 2},
    "phimoe": {"sliding_window": 1024},
    "plbart": {"encoder_attention_heads": 4, "decoder_attention_heads": 4},
    "reformer": {
        "attention_head_size": 16,
        "attn_layers": ["local", "lsh"],
        "axial_pos_embds_dim": [32, 32],
        "axial_pos_shape": [32, 32],
        "is_decoder": True,
        "num_buckets": 8,
    },
    "whisper": {"decoder_attention_heads": 4, "decoder_layers": _LAYERS},
    "zaya": {"num_experts_per_tok": 1},
    "xmod": {"default_language": "en_XX", "languages": ["en_XX"]},
    "longcat_flash": {"num_layers": _LAYERS // 2, "head_dim": 8},
}


@dataclass(frozen=True)
class Finding:
    """What became of one type.

    Attributes:
        verdict: "run", "refused", "broken" or "untried".
        said: why, unless it runs.
    """

    verdict: str
    said: str = ""


def text_types() -> list[str]:
    """Return the model types of text that generate, by transformers' own list."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    found = []
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        known = CONFIG_MAPPING[kind]
        if not {"vision_config", "audio_config", "text_config"} & set(getattr(known, "sub_configs", None) or ()):
            found.append(kind)
    return found


def media_types() -> list[str]:
    """Return the model types that read media, by transformers' own lists."""
    texts = set(text_types())
    return [kind for kind in media_classes() if kind not in texts]


def media_classes() -> dict[str, str]:
    """Return model type -> the name of its class, of those in transformers' lists of models that read media."""
    from transformers.models.auto import modeling_auto as known
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    found = known.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES | known.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES
    for kind, name in known.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.items():
        # Most of this list translates texts.
        if kind in CONFIG_MAPPING and "audio_config" in (getattr(CONFIG_MAPPING[kind], "sub_configs", None) or ()):
            found.setdefault(kind, name)
    return dict(found)


def _of_text(kind: str) -> bool:
    """Return whether a type of transformers' list of those that read media is a text model of one configuration."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    known = CONFIG_MAPPING[kind]
    return not known.sub_configs and hasattr(transformers, known.__name__.removesuffix("Config") + "ForCausalLM")


def rows_of(kind: str) -> list[str]:
    """Return the checkpoint layouts of this type that the oracle compares."""
    package = registry.find(kind)
    if not package:
        found = (each for each, family in registry.families().items() if kind in family.model_types)
        package = next(found, "")
    return [row.name for row in registry.facts(package).tested if not row.by_census]


def tiny_config(kind: str) -> Any:
    """Return a small configuration of this type."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    known = CONFIG_MAPPING[kind]
    names = {field.name for field in dataclasses.fields(known)} | set(known.attribute_map)
    sizes = {name: value for name, value in (SIZES | IDS).items() if name in names}
    if "kv_lora_rank" in names:
        # Every head has a key of its own, which follows from the latent.
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    # One name for each size: what others stand for would be set twice.
    sizes = {name: value for name, value in sizes.items() if known.attribute_map.get(name) not in sizes}
    return known(**tiny._reshape.get()(sizes | PECULIAR.get(kind, {})))


def make(kind: str, folder: Path) -> Any:
    """Write a tiny checkpoint of this type into the empty folder; returns transformers' model of it."""
    from transformers import AutoModelForCausalLM

    config = tiny_config(kind)
    speaker: Any = getattr(transformers, type(config).__name__.removesuffix("Config") + "ForCausalLM", None)
    speaker = speaker or AutoModelForCausalLM._model_mapping[type(config)]
    text.write_qwen_tokenizer(folder, text.QWEN_TEXT_SPECIALS, "<|im_end|>", {})
    torch.manual_seed(0)
    with torch.device("meta"):
        count = sum(each.numel() for each in speaker._from_config(config).parameters())
    if count > _MOST_NUMBERS:
        raise ValueError(f"its class has {count} numbers with small sizes")
    model = speaker._from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    tiny._fill(model)
    model.config.architectures = [type(model).__name__]
    model.save_pretrained(folder)
    return speaker.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def prompts() -> list[list[int]]:
    """Return token ids of prompts, the same in every run."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 400, (length,), generator=generator).tolist() for length in _LENGTHS]


def expected(model: Any, prompt: list[int]) -> tuple[list[int], torch.Tensor]:
    """Return transformers' greedy answer and the logits of each step (N, V)."""
    from transformers import GenerationConfig

    model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)
    with torch.inference_mode():
        made = model.generate(
            input_ids=torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=_ANSWER_TOKENS,
            output_logits=True,
            return_dict_in_generate=True,
        )
    return made.sequences[0, len(prompt) :].tolist(), torch.cat(list(made.logits))


def compare(folder: Path, model: Any) -> str:
    """Return how the engine's answers differ from transformers'; empty if they do not."""
    wanted = [expected(model, prompt) for prompt in prompts()]
    asked: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts()]
    options: dict[str, Any] = {"max_num_batched_tokens": 16, "num_gpu_blocks_override": 256, "max_model_len": 256}
    for way, outputs in answers(folder, asked, options):
        for prompt, (tokens, logits_NV), output in zip(prompts(), wanted, outputs, strict=True):
            if said := differs(output, tokens, logits_NV):
                return f"{way}after {len(prompt)} tokens, {said}"
    return ""


def answers(folder: Path, asked: list[Any], options: dict[str, Any]) -> Iterator[tuple[str, list[Any]]]:
    """Ask the engine the same in several ways; yields how, as the beginning of a sentence, and the answers.

    Prompts are cut into steps; then they are found in the cache; then there are so few blocks that two of the longest
    prompts just fit: the later one is preempted when the first grows, unless their layers keep states alone, or the
    first block of their answers holds it whole.
    """
    from beheld import LLM, SamplingParams

    params = SamplingParams(temperature=0, max_tokens=_ANSWER_TOKENS, ignore_eos=True, logprobs=1)
    usual: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 4, "block_size": _BLOCK, "disable_log_stats": True}
    # A third of a GPU, so that others can run beside.
    usual |= {"gpu_memory_utilization": 0.3} if torch.cuda.is_available() else {}
    with LLM(model=str(folder), **usual, **options) as llm:
        outputs = llm.generate(asked, params, use_tqdm=False)
        yield "", outputs
        yield "asked again, ", llm.generate(asked, params, use_tqdm=False)
    longest = max(range(len(asked)), key=lambda place: len(outputs[place].prompt_token_ids))
    length = len(outputs[longest].prompt_token_ids)
    # The null block, and those of the longest prompt twice, but not of both answers. One step computes both prompts.
    blocks = 1 + max(2 * -(-length // _BLOCK), -(-(length + _ANSWER_TOKENS) // _BLOCK))
    step = max(2 * length, options["max_num_batched_tokens"])
    room = {"max_model_len": length + _ANSWER_TOKENS, "num_gpu_blocks_override": blocks, "max_num_batched_tokens": step}
    with LLM(model=str(folder), enable_prefix_caching=False, **usual, **options | room) as llm:
        first, second, *others = llm.generate([asked[longest]] * 2 + asked, params, use_tqdm=False)
    for found in (first, second):
        others[longest] = found
        yield "with few blocks, ", others


def differs(output: Any, tokens: list[int], logits_NV: torch.Tensor) -> str:
    """Return how an answer differs from transformers' tokens and logits (N, V); empty if it does not."""
    count = len(output.outputs[0].token_ids)
    if count != len(tokens):
        return f"the answer has {count} tokens in place of {len(tokens)}"
    logprobs_NV, steps = logits_NV.log_softmax(-1), output.outputs[0].logprobs
    for step, token in enumerate(output.outputs[0].token_ids):
        off = abs(float(logprobs_NV[step, token]) - steps[step][token].logprob)
        if not off < _TOLERANCE:
            return f"at step {step} a log-probability is off by {off:.2g}"
        if token != tokens[step]:
            if float(logprobs_NV[step, tokens[step]] - logprobs_NV[step, token]) > 2 * _TOLERANCE:
                return f"token {step} is not the most likely one"
            # The two best are as near as rounding; what follows is another text.
            break
    return ""


def read(kind: str, folder: Path) -> Finding:
    """Return what the engine says of a type's own configuration, which is written into the folder; nothing runs."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    names = media_classes()
    try:
        config = CONFIG_MAPPING[kind]() if kind in names else tiny_config(kind)
        config.architectures = [names[kind]] if kind in names else None
        config.save_pretrained(folder)
    except Exception as error:
        return Finding("untried", _first(error))
    try:
        read_info(folder, EngineArgs())
    except BeheldError as error:
        return Finding("refused", _first(error))
    except Exception as error:
        return Finding("broken", _first(error))
    return Finding("untried", "it has no recipe")


def examine(kind: str) -> Finding:
    """Return what becomes of this type."""
    if kind in media_types() and kind not in RECIPES and not _of_text(kind):
        rows = rows_of(kind)
        if rows:
            return Finding("run", f"compared by the oracle: {', '.join(rows)}")
        with tempfile.TemporaryDirectory(prefix="beheld-census-") as name:
            return read(kind, Path(name))
    recipe = RECIPES.get(kind)
    with tempfile.TemporaryDirectory(prefix="beheld-census-") as name:
        folder = Path(name)
        try:
            if recipe is None:
                model = make(kind, folder)
                expected(model, prompts()[1])
            else:
                model, processor = census_media.make(kind, recipe, folder)
                census_media.expected(model, processor, recipe, census_media.trial(recipe))
        except Exception as error:
            with tempfile.TemporaryDirectory(prefix="beheld-census-") as other:
                found = read(kind, Path(other))
            return found if found.verdict == "refused" else Finding("untried", _first(error))
        try:
            said = compare(folder, model) if recipe is None else census_media.compare(folder, model, processor, recipe)
        except BeheldError as error:
            # What fails only when the engine first computes was let in.
            return Finding("broken" if "cannot compute a text" in str(error) else "refused", _first(error))
        except Exception as error:
            return Finding("broken", _first(error))
    return Finding("broken", said) if said else Finding("run")


def _first(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


def _quietly(kind: str, send: Any) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (_MOST_S, _MOST_S + 5))
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    send.send(examine(kind))


def apart(kind: str) -> Finding:
    """Examine a type in a process of its own, which is ended when it takes too long."""
    forked = multiprocessing.get_context("fork")
    receive, send = forked.Pipe(duplex=False)
    process = forked.Process(target=_quietly, args=(kind, send))
    process.start()
    send.close()
    try:
        if not receive.poll(_MOST_S * _MOST_WAITS):
            return Finding("broken", f"it took more than {_MOST_S * _MOST_WAITS} s")
        found: Finding = receive.recv()
        return found
    except EOFError:
        process.join()
        if process.exitcode == -signal.SIGXCPU:
            return Finding("broken", f"it took more than {_MOST_S} s of processor time")
        return Finding("broken", "its process died")
    finally:
        process.kill()
        process.join()


def main(kinds: list[str]) -> int:
    """Print a line for each type, and their numbers.

    Args:
        kinds: types; none for all, and "1/2" for the first of two parts of them, which take about as long.
    """
    torch.set_num_threads(1)
    counts: Counter[str] = Counter()
    part, _, parts = kinds[0].partition("/") if kinds else ("", "", "")
    # What every process needs is imported once, before they are forked.
    known = [*text_types(), *media_types()]
    for module in ("beheld.engine.setup", "beheld.executor.local", "transformers.modeling_utils"):
        importlib.import_module(module)
    registry.families()
    whole = not kinds
    if whole or parts:
        kinds = known
    if parts:
        kinds = kinds[int(part) - 1 :: int(parts)]
    media, running = media_types(), Counter[str]()
    for kind in kinds:
        found = apart(kind)
        counts[found.verdict] += 1
        running["media" if kind in media else "text"] += found.verdict == "run"
        print(f"{found.verdict:8} {kind}{': ' if found.said else ''}{found.said}", flush=True)
    verdicts = ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items()))
    print(f"{verdicts}; {running['media']} that read media run, and {running['text']} of text alone")
    few = whole and (running["media"] < LEAST_MEDIA or running["text"] < LEAST_TEXT)
    return 1 if counts["broken"] or few else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
