"""Output tokens/s of every tested family and type of text on a CPU, against transformers' batched generate.

    python -m benchmarks.families [--only llava,gemma3] [--requests 8] [--tokens 24] [--scale 8] [--rounds 2]
                                   [--clock wall]

Each family's tiny checkpoint, the census's where the oracle has none, is made again with `scale` times the widths and
heads (the size of a head stays), so that arithmetic outweighs bookkeeping. Both engines answer the same prompts with
the same media, greedily, in float32, with one thread, in one process and in turn; every round brings new media. Prompts
have different lengths, unless transformers' processor takes one prompt or pads none: those have one length. A round's
time includes the processors. On a machine that does other things besides, `--clock cpu` counts the processor time of
this process instead: what has been taken by others is not in it, though their use of caches and memory is. Of a
quantized checkpoint, transformers is given the numbers that it stands for. One JSON line per family, then a table; a
family that cannot be measured is printed with the reason. Answers are not compared here: that is what tests/oracle and
tests/census do.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import families_census

WIDTHS = frozenset(
    (
        *("hidden_size", "intermediate_size", "intermediate_size_mlp", "moe_intermediate_size", "d_model", "ffn_dim"),
        *("num_attention_heads", "num_key_value_heads", "num_global_key_value_heads", "num_heads", "attention_heads"),
        *("encoder_attention_heads", "encoder_ffn_dim", "decoder_attention_heads", "decoder_ffn_dim"),
        *("conf_num_attention_heads", "hidden_size_per_layer_input", "laurel_rank", "embed_dim", "out_hidden_size"),
        *("output_dim", "output_proj_dims", "projection_dim", "projector_hidden_size", "projector_input_dim"),
        *("projector_output_dim", "vision_output_dim", "text_hidden_size", "encoder_hidden_size", "num_groups"),
        *("image_text_hidden_size", "word_embed_proj_dim", "downsample_hidden_size", "alignment_intermediate_size"),
        *("block_ff_dim", "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
        *("shared_intermediate_size", "kv_lora_rank", "q_lora_rank", "mamba_d_ssm", "n_embd", "n_inner", "n_head"),
        *("linear_num_key_heads", "linear_num_value_heads", "mamba_num_heads", "mamba_n_heads", "mamba_dt_rank"),
    )
)
"""Names in configurations that mean a width or a number of heads: what a larger model of the family has more of."""
FIXED = {
    "gemma3n": ("vision_config",),  # The package timm knows the tower's widths by the name of its architecture.
    "chameleon": ("vq_config",),  # A codebook's words are short in the real checkpoints too.
    "deepseek_ocr2": ("vision_config",),  # Some widths of its tower follow from others that have names of their own.
    "emu3": ("vq_config",),  # As chameleon's.
    "fast_vlm": ("vision_config",),  # As gemma3n's.
}
"""Family -> the parts of its configuration that keep their shape."""
MORE: dict[str, frozenset[str]] = {
    **dict.fromkeys(
        ("deepseek_ocr", "deepseek_vl_v2", "deepseek_vl_v2_small"),
        frozenset(("n_embed", "input_dim", "width", "heads", "downsample_channels", "output_channels")),
    ),
    "gemma4_unified": frozenset(("mm_embed_dim", "mm_posemb_size")),
    **dict.fromkeys(("granite_speech", "granite_speech_plus"), frozenset(("hidden_dim",))),
    "idefics2": frozenset(("resampler_n_heads",)),
    "kimi_k25": frozenset(("projection_hidden_size",)),
    "nemo_speechlm": frozenset(("audio_hidden_size",)),
    "nemotron_h_omni": frozenset(("vision_hidden_size",)),
    "pp_formulanet": frozenset(("decoder_hidden_size",)),
    "speech-encoder-decoder": frozenset(("output_hidden_size",)),
    "step3p7": frozenset(("num_sliding_attention_heads", "share_expert_dim")),
}
"""Family -> widths that are named otherwise."""
ONE_PROMPT = frozenset(
    (
        *("voxtral", "phi3_v", "hyperclovax_vlm", "h2ovl_chat", "nvlm_d", "internvl_chat", "internvl_chat_qwen2"),
        *("minicpmv", "minicpmo", "minicpmv_2_0", "minicpmv_2_5", "minicpmv_4_0", "minicpmv_4_5"),
        *("qwen_vl", "qwen_vl_chat", "ultravox", "deepseek_ocr", "deepseek_vl_v2", "deepseek_vl_v2_small"),
    )
)
"""Families whose processor takes one prompt, or pads none: theirs have one length and media of one size."""
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
"""What a round's seconds may be read from."""


@dataclass(frozen=True)
class Speed:
    """What one family reached.

    Attributes:
        family: its name on the page docs/models.md.
        beheld: output tokens per second, median of the rounds.
        transformers: the same.
        parameters: of the model.
    """

    family: str
    beheld: float
    transformers: float
    parameters: int

    @property
    def ratio(self) -> float:
        """How many times transformers' speed; below 1 is slower."""
        return self.beheld / self.transformers


def enlarged(
    part: dict[str, Any], scale: int, fixed: tuple[str, ...] = (), more: frozenset[str] = frozenset()
) -> dict[str, Any]:
    """A configuration with `scale` times the widths and heads; parts and widths named in `fixed` stay as they are.

    A width that is given by layer or stage is a list; sizes of heads stay, also where they follow from the others.
    `more` are further names of widths.
    """

    def of(name: str, value: Any) -> Any:
        if name in fixed:
            return value
        if isinstance(value, dict):
            return enlarged(value, scale, fixed, more)
        if name not in WIDTHS | more or value is None:
            return value
        return [scale * each for each in value] if isinstance(value, list) else scale * value

    return {name: of(name, value) for name, value in part.items()}


class Oracle:
    """A family whose checkpoint the oracle has."""

    def __init__(self, family: str) -> None:
        self._family = family

    def make(self, folder: Path, reshape: families_census.Reshape) -> Path:
        """Write the enlarged checkpoint into the new `folder`, random weights; adapters are enlarged with it."""
        from safetensors.torch import load_file, save_file

        from tests import tiny

        tiny.reshaped(self._family, folder, reshape)
        for path in folder.glob("*/adapter_model.safetensors"):
            tensors = load_file(path)
            for name, tensor in tensors.items():
                # A is (rank, inputs), B (outputs, rank).
                times = reshape({"hidden_size": 1})["hidden_size"]
                tensors[name] = tensor.repeat(*((1, times) if ".lora_A." in name else (times, 1))) / times
            save_file(tensors, path, metadata={"format": "pt"})
        return folder

    def load(self, folder: Path) -> Any:
        """transformers' model."""
        from tests import tiny
        from tests.oracle import reference
        from tests.tiny_quantized import readable

        source = readable(self._family, folder)
        model = reference.load_model(self._family, source)
        self._processor = reference.load_processor(self._family, source)
        if self._family in tiny.ADAPTED_FAMILIES:
            model.load_adapter(str(folder / "vision-lora"), adapter_name="vision")
            model.set_adapter("vision")
            model.eval()
        return model

    def asks(self, requests: int, turn: int) -> list[Any]:
        """One medium and a question each, as the family takes them: of different lengths, if they can be padded."""
        from tests import tiny
        from tests.oracle import cases

        asks = []
        alike = self._alike()
        for number in range(requests):
            seed = 1000 * turn + number
            width, height = tiny.SIZES[0 if alike else number % 4]
            tail = f"{number % 10}" if alike else cases.LONG_TEXT[: 40 + 8 * (number % 8)] + f" {turn}?"
            if self._family in tiny.IMAGE_FAMILIES:
                ask = cases.Ask("{i}" + tail, ((width, height, seed),))
            elif self._family in tiny.SOUND_FAMILIES or self._family in tiny.APART:
                ask = cases.Ask("{a}" + tail, sounds=((1.0, seed),))
            else:
                # Other first words, so that no prompt's beginning is found in the prefix cache.
                ask = cases.Ask(f"{turn} {number} {cases.LONG_TEXT} {tail}")
            asks.append(ask)
        return list(cases.fit(self._family, *asks))

    def batch(self, asks: list[Any]) -> dict[str, Any]:
        """transformers' inputs of all requests at once, padded on the left or of one length."""
        import torch

        from tests import tiny
        from tests.oracle import reference

        if self._alike():
            return families_census.joined([reference.inputs(self._family, ask) for ask in asks])
        tokenizer = getattr(self._processor, "tokenizer", self._processor)
        tokenizer.padding_side = "left"
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
        media: dict[str, Any] = {}
        if asks[0].images:
            media["images"] = [ask.pictures() for ask in asks]
        if asks[0].sounds:
            media["audio"] = [wave for ask in asks for wave in ask.waves()]
            media["audio_kwargs"] = {"sampling_rate": tiny.SOUND_RATE}
        texts = [reference.prompt(self._family, ask) for ask in asks]
        return dict(self._processor(text=texts, padding=True, return_tensors="pt", **media).to(torch.float32))

    def request(self, ask: Any) -> dict[str, Any]:
        """A prompt as the engine takes it."""
        from tests.oracle.test_oracle import request

        return request(self._family, ask)

    def options(self) -> dict[str, Any]:
        """The engine's options that the prompts need."""
        return {}

    def _alike(self) -> bool:
        from tests import tiny

        return self._family in ONE_PROMPT or self._family in (*tiny.LISTED_FAMILIES, *tiny.APART)


class Whisper(Oracle):
    """A transcript of one audio, from control tokens; transformers computes it by its generate() for all models."""

    def asks(self, requests: int, turn: int) -> list[Any]:
        """An audio of 1 s to each prompt."""
        from tests.oracle.test_whisper import Said

        return [Said((1.0, 1000 * turn + number)) for number in range(requests)]

    def load(self, folder: Path) -> Any:
        """transformers' model, whose answers do not end."""
        from transformers.generation import GenerationMixin

        model = super().load(folder)
        model.generate = functools.partial(GenerationMixin.generate, model, generation_config=_endless(folder))
        return model

    def batch(self, asks: list[Any]) -> dict[str, Any]:
        """Features of all audio, and the prompts."""
        import torch

        from tests.oracle import whisper_reference as reference

        features = torch.cat([reference.features(*ask.sound) for ask in asks])
        ids = torch.tensor([reference.ids(ask.prompt) for ask in asks])
        return {"input_features": features, "decoder_input_ids": ids}

    def request(self, ask: Any) -> dict[str, Any]:
        """A prompt as the engine takes it."""
        from tests.oracle.test_whisper import request

        return request(ask)


def _endless(folder: Path) -> Any:
    from transformers import GenerationConfig

    made = GenerationConfig.from_pretrained(folder)
    made.update(max_length=None, do_sample=False, num_beams=1, eos_token_id=None)
    return made


def subject(family: str) -> Any:
    """What makes a family's checkpoint and questions.

    Raises:
        LookupError: it has no checkpoint with these versions of the libraries.
    """
    from beheld.families.text_types import TEXT_TYPES
    from tests import census, tiny

    if family == "whisper":
        return Whisper(family)
    if family in tiny.TINY or family in tiny.APART:
        return Oracle(family)
    if family in census.RECIPES:
        return families_census.Media(family)
    if family in TEXT_TYPES:
        return families_census.Texts(family)
    raise LookupError("no tiny checkpoint with these versions of the libraries")


def make(family: str, folder: Path, scale: int) -> Any:
    """What has made the enlarged checkpoint of `family` in the new `folder`."""
    made = subject(family)
    made.make(folder, lambda config: enlarged(config, scale, FIXED.get(family, ()), MORE.get(family, frozenset())))
    return made


class Theirs:
    """transformers on an enlarged checkpoint."""

    def __init__(self, made: Any, folder: Path) -> None:
        self._made, self._model = made, made.load(folder)
        self.parameters = sum(parameter.numel() for parameter in self._model.parameters())

    def answer(self, asks: list[Any], tokens: int) -> int:
        """Answer all requests in one batch; the number of tokens written."""
        import torch

        inputs = self._made.batch(asks)
        with torch.inference_mode():
            made = self._model.generate(**inputs, min_new_tokens=tokens, max_new_tokens=tokens)
        given = next((inputs[name].shape[1] for name in ("decoder_input_ids", "input_ids") if name in inputs), 0)
        # BLIP-2 gives the answer alone, decoders behind an encoder their start, others what they were given before it;
        # BLIP leaves out the last token of that.
        if made.shape[1] - tokens not in (0, 1, given - 1, given):
            raise RuntimeError(f"transformers wrote {made.shape[1] - given} tokens per request, not {tokens}")
        return int(made.shape[0] * tokens)


class Ours:
    """beheld on an enlarged checkpoint."""

    def __init__(self, made: Any, folder: Path, requests: int) -> None:
        from beheld import LLM

        self._made = made
        options = {"max_num_seqs": requests, "kv_cache_memory_bytes": 1 << 29} | made.options()
        self._llm = LLM(str(folder), dtype="float32", disable_log_stats=True, seed=0, **options)

    def answer(self, asks: list[Any], tokens: int) -> int:
        """Answer all requests in one call; the number of tokens written."""
        from beheld import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        outputs = self._llm.generate([self._made.request(ask) for ask in asks], params, use_tqdm=False)
        written = sum(len(output.outputs[0].token_ids) for output in outputs)
        if written != tokens * len(asks):
            raise RuntimeError(f"beheld wrote {written} tokens, not {tokens * len(asks)}")
        return written

    def close(self) -> None:
        """Free the engine."""
        self._llm.close()


def measure(
    family: str, folder: Path, *, requests: int, tokens: int, scale: int, rounds: int, clock: str = "wall"
) -> Speed:
    """Both engines on one enlarged checkpoint in `folder`, in turn, after one round that is not counted.

    `clock` is a name in CLOCKS.
    """
    now = CLOCKS[clock]
    path = folder / family
    made = make(family, path, scale)
    theirs, ours = Theirs(made, path), Ours(made, path, requests)
    rates: dict[str, list[float]] = {"beheld": [], "transformers": []}
    try:
        for turn in range(rounds + 1):
            asks = made.asks(requests, turn)
            for name in rates:
                start = now()
                written = (ours if name == "beheld" else theirs).answer(asks, tokens)
                if turn > 0:
                    rates[name].append(written / (now() - start))
    finally:
        ours.close()
    medians = {name: statistics.median(values) for name, values in rates.items()}
    return Speed(family, medians["beheld"], medians["transformers"], theirs.parameters)


def table(speeds: list[Speed], failed: dict[str, str]) -> str:
    """Markdown: the slowest ratio first, then what could not be measured."""
    lines = ["| family | beheld | transformers | ratio |", "|---|---|---|---|"]
    for speed in sorted(speeds, key=lambda each: each.ratio):
        lines.append(f"| {speed.family} | {speed.beheld:.0f} | {speed.transformers:.0f} | {speed.ratio:.2f} |")
    return "\n".join([*lines, *(f"| {family} | not measured: {reason} | | |" for family, reason in failed.items())])


def families(only: str | None) -> list[str]:
    """The families to measure: those named, or all that are tested.

    Raises:
        SystemExit: one that is named is not tested.
    """
    from beheld.families import page
    from beheld.families.text_types import TEXT_TYPES

    known = list(dict.fromkeys([*(each.name for each in page.tested()), *TEXT_TYPES]))
    chosen = only.split(",") if only else known
    if strange := [name for name in chosen if name not in known]:
        sys.exit(f"not a tested family: {', '.join(strange)}; known are {', '.join(known)}")
    return chosen


def main(arguments: list[str] | None = None) -> None:
    """Parse the command line and run; the exit status is 1 if a family could not be measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="families, separated by commas")
    for name, default in (("requests", 8), ("tokens", 24), ("scale", 8), ("rounds", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument(
        "--clock", choices=tuple(CLOCKS), default="wall", help="time that passes, or this process's own"
    )
    given = parser.parse_args(arguments)
    chosen = families(given.only)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    speeds, failed = [], {}
    options = {"requests": given.requests, "tokens": given.tokens, "scale": given.scale, "rounds": given.rounds}
    for family in chosen:
        with tempfile.TemporaryDirectory(prefix="beheld-families-") as folder:
            try:
                speed = measure(family, Path(folder), **options, clock=given.clock)
            except Exception as error:  # One family's failure is its row of the table, not the end of the others.
                failed[family] = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
                print(json.dumps({"family": family, "failed": failed[family]}), flush=True)
                continue
            finally:
                gc.collect()
        speeds.append(speed)
        line = {"family": family, "beheld": round(speed.beheld, 1), "transformers": round(speed.transformers, 1)}
        print(json.dumps(line | {"ratio": round(speed.ratio, 2), "parameters": speed.parameters}), flush=True)
    print(table(speeds, failed))
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
