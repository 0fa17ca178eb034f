"""Output tokens/s of every tested family on a CPU, beside transformers' batched generate.

    python -m benchmarks.families [--only llava,gemma3] [--requests 8] [--tokens 24] [--scale 8] [--rounds 2]
                                   [--clock wall]

Each family's tiny checkpoint is made again with `scale` times the widths and heads (the size of a head stays), so that
arithmetic outweighs bookkeeping. Both engines answer the same prompts with the same media, greedily, in float32, with
one thread, in one process and in turn; every round brings new media. A round's time includes the processors. On a
machine that does other things besides, `--clock cpu` counts the processor time of this process instead: what has been
taken by others is not in it, though their use of caches and memory is. Of a quantized checkpoint, transformers is given
the numbers that it stands for. One JSON line per family, then a table; a family
that cannot be measured is printed with the reason. Answers are not compared here: that is what tests/oracle does.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

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
        *("shared_intermediate_size", "kv_lora_rank", "q_lora_rank", "mamba_d_ssm"),
        *("linear_num_key_heads", "linear_num_value_heads", "mamba_num_heads", "mamba_n_heads", "mamba_dt_rank"),
    )
)
"""Names in configurations that mean a width or a number of heads: what a larger model of the family has more of."""
FIXED = {
    "gemma3n": ("vision_config",),  # The package timm knows the tower's widths by the name of its architecture.
    "chameleon": ("vq_config",),  # A codebook's words are short in the real checkpoints too.
}
"""Family -> the parts of its configuration that keep their shape."""
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


def enlarged(part: dict[str, Any], scale: int, fixed: tuple[str, ...] = ()) -> dict[str, Any]:
    """A configuration with `scale` times the widths and heads; parts named in `fixed` stay as they are.

    A width that is given by layer or stage is a list; sizes of heads stay, also where they follow from the others.
    """

    def of(name: str, value: Any) -> Any:
        if isinstance(value, dict):
            return value if name in fixed else enlarged(value, scale, fixed)
        if name not in WIDTHS or value is None:
            return value
        return [scale * each for each in value] if isinstance(value, list) else scale * value

    return {name: of(name, value) for name, value in part.items()}


def make(family: str, folder: Path, scale: int) -> Path:
    """The enlarged checkpoint of `family` in the new `folder`, random weights; adapters are enlarged with it."""
    from safetensors.torch import load_file, save_file

    from tests import tiny

    tiny.reshaped(family, folder, lambda config: enlarged(config, scale, FIXED.get(family, ())))
    for path in folder.glob("*/adapter_model.safetensors"):
        tensors = load_file(path)
        for name, tensor in tensors.items():
            # A is (rank, inputs), B (outputs, rank).
            tensors[name] = tensor.repeat(*((1, scale) if ".lora_A." in name else (scale, 1))) / scale
        save_file(tensors, path, metadata={"format": "pt"})
    return folder


def questions(family: str, requests: int, tokens: int, turn: int) -> list[Any]:
    """One medium and a question each, of different lengths, as the family takes them; another `turn`, other media."""
    from tests import tiny
    from tests.oracle import cases

    asks = []
    for number in range(requests):
        seed = 1000 * turn + number
        width, height = tiny.SIZES[number % 4]
        # Voxtral's prompts cannot be padded by its processor: see `batch`.
        tail = f"{number % 10}" if family == "voxtral" else cases.LONG_TEXT[: 40 + 8 * (number % 8)] + f" {turn}?"
        if family in tiny.IMAGE_FAMILIES:
            ask = cases.Ask("{i}" + tail, ((width, height, seed),))
        elif family in tiny.SOUND_FAMILIES:
            ask = cases.Ask("{a}" + tail, sounds=((1.0, seed),))
        else:
            # Other first words, so that no prompt's beginning is found in the prefix cache.
            ask = cases.Ask(f"{turn} {number} {cases.LONG_TEXT} {tail}")
        asks.append(replace(ask, max_tokens=tokens))
    return list(cases.fit(family, *asks))


def batch(family: str, processor: Any, asks: list[Any]) -> dict[str, Any]:
    """transformers' inputs of all requests at once, padded on the left."""
    import torch

    from tests import tiny
    from tests.oracle import reference

    if family == "voxtral":
        parts = [reference.inputs(family, ask) for ask in asks]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    tokenizer = getattr(processor, "tokenizer", processor)
    tokenizer.padding_side = "left"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    media: dict[str, Any] = {}
    if asks[0].images:
        media["images"] = [ask.pictures() for ask in asks]
    if asks[0].sounds:
        media["audio"] = [wave for ask in asks for wave in ask.waves()]
        media["audio_kwargs"] = {"sampling_rate": tiny.SOUND_RATE}
    made = processor(text=[reference.prompt(family, ask) for ask in asks], padding=True, return_tensors="pt", **media)
    return dict(made.to(torch.float32))


class Theirs:
    """transformers on an enlarged checkpoint."""

    def __init__(self, family: str, folder: Path) -> None:
        from tests import tiny
        from tests.oracle import reference
        from tests.tiny_quantized import readable

        self._family = family
        self._model = reference.load_model(family, readable(family, folder))
        self._processor = reference.load_processor(family, readable(family, folder))
        self.parameters = sum(parameter.numel() for parameter in self._model.parameters())
        if family in tiny.ADAPTED_FAMILIES:
            self._model.load_adapter(str(folder / "vision-lora"), adapter_name="vision")
            self._model.set_adapter("vision")
            self._model.eval()

    def answer(self, asks: list[Any]) -> int:
        """Answer all requests in one batch; the number of tokens written."""
        import torch

        tokens = asks[0].max_tokens
        inputs = batch(self._family, self._processor, asks)
        with torch.inference_mode():
            made = self._model.generate(**inputs, min_new_tokens=tokens, max_new_tokens=tokens)
        before = 1 if self._model.config.is_encoder_decoder else inputs["input_ids"].shape[1]
        # BLIP-2 gives the answer alone, others what they were given before it.
        written = made.shape[1] if made.shape[1] <= before else made.shape[1] - before
        if written != tokens:
            raise RuntimeError(f"transformers wrote {written} tokens per request, not {tokens}")
        return int(made.shape[0] * written)


class Ours:
    """beheld on an enlarged checkpoint."""

    def __init__(self, folder: Path, requests: int) -> None:
        from beheld import LLM

        options = {"max_num_seqs": requests, "kv_cache_memory_bytes": 1 << 29}
        self._llm = LLM(str(folder), dtype="float32", disable_log_stats=True, seed=0, **options)

    def answer(self, family: str, asks: list[Any]) -> int:
        """Answer all requests in one call; the number of tokens written."""
        from beheld import SamplingParams
        from tests.oracle.test_oracle import request

        tokens = asks[0].max_tokens
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        outputs = self._llm.generate([request(family, ask) for ask in asks], params, use_tqdm=False)
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
    path = make(family, folder / family, scale)
    theirs, ours = Theirs(family, path), Ours(path, requests)
    rates: dict[str, list[float]] = {"beheld": [], "transformers": []}
    try:
        for turn in range(rounds + 1):
            asks = questions(family, requests, tokens, turn)
            for name in rates:
                start = now()
                written = ours.answer(family, asks) if name == "beheld" else theirs.answer(asks)
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

    known = [each.name for each in page.tested()]
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

    from tests import tiny

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    speeds, failed = [], {}
    options = {"requests": given.requests, "tokens": given.tokens, "scale": given.scale, "rounds": given.rounds}
    for family in chosen:
        with tempfile.TemporaryDirectory(prefix="beheld-families-") as folder:
            try:
                if family not in tiny.TINY:
                    raise LookupError("no tiny checkpoint with these versions of the libraries")
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
