"""`beheld plan MODEL MEDIA...`: tokens per item and memory, computed from the configuration without the weights."""

from __future__ import annotations

import argparse
import json
import re
from typing import Any

from beheld.cli.media import references
from beheld.core.config import EngineArgs
from beheld.core.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("model", metavar="MODEL", help="a folder, a GGUF file, a hub name, or mote")
    parser.add_argument("media", nargs="*", metavar="MEDIA", help="files, URLs, or -")
    parser.add_argument("--tp", type=count_of, default=1, metavar="N", help="GPUs that share the model")
    parser.add_argument("--pp", type=count_of, default=1, metavar="M", help="stages of a pipeline, of N GPUs each")
    gpus = "the GPUs, as 2x80GiB or 2xH100: tells how much fits, and how fast it may be"
    parser.add_argument("--gpus", type=gpus_of, metavar="NxGIB", help=gpus)
    parser.add_argument("--dtype", default="auto", help="the type of weights and activations")
    parser.add_argument("--kv-cache-dtype", default="auto", help="that of keys and values: fp8 and int8 take 8 bits")
    parser.add_argument("--quantization", help="how weights are rounded as they are loaded: fp8, int4, int8, nf4")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--trust-remote-code", action="store_true")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the plan."""
    from beheld.tools.plan import plan

    names = ("trust_remote_code", "dtype", "kv_cache_dtype", "quantization")
    given = {name: getattr(arguments, name) for name in names}
    args = EngineArgs(model=arguments.model, **given)
    wanted = arguments.tp * arguments.pp
    count, gpu_bytes = arguments.gpus or (wanted, None)
    if count < wanted:
        raise ConfigError(
            f"--tp {arguments.tp} and --pp {arguments.pp} need {wanted} GPUs, and --gpus names {count}.", param="gpus"
        )
    made = plan(args, references(arguments.media), arguments.tp, gpu_bytes, arguments.pp, count)
    if arguments.json:
        print(json.dumps(made))
    else:
        _print(made)
    return 0


def count_of(text: str) -> int:
    """Return a number of GPUs."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"not a number from 1: {text!r}")
    return int(text)


def gpus_of(text: str) -> tuple[int, int]:
    """Return the number of GPUs and the bytes of each, of "2x80GiB", "80GiB" or "2xH100"."""
    from beheld.tools.scaling import GPUS

    named = re.fullmatch(r"(?:(\d{1,6})x)?(\w+)", text)
    gpu = None if named is None else next((each for each in GPUS if each.name == named[2].upper()), None)
    if named is not None and gpu is not None:
        return int(named[1] or 1), gpu.memory_bytes
    found = re.fullmatch(r"(?:(\d{1,6})x)?(\d{1,6}(?:\.\d+)?)(?:GiB|GB)?", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"not of the form 2x80GiB or 2xH100: {text!r}")
    return int(found[1] or 1), int(float(found[2]) * 2**30)


def _print(made: dict[str, Any]) -> None:
    model = made["model"]
    ranks = model.get("ranks", 1)
    stages = model.get("stages", 1)
    where = "" if ranks == 1 else f" on each of {ranks} GPUs"
    if stages > 1:
        where = f" in the largest of {stages} stages" + where
    parameters = f"{model['parameters'] / 1e9:.3f} B parameters{where}"
    print(f"{model['name']}: {model['architecture']}, {parameters}, {model['dtype']}")
    print(f"  weights           {model['weights_bytes'] / 2**30:8.3f} GiB")
    print(f"  KV cache          {model['kv_bytes_per_token'] / 2**10:8.1f} KiB a token")
    if model["state_bytes_per_sequence"]:
        mib = model["state_bytes_per_sequence"] / 2**20
        print(f"  recurrent state   {mib:8.1f} MiB a sequence, and as much a kept prefix")
    if ranks > 1:
        print(f"  over the links    {model['link_bytes_per_token'] / 2**10:8.1f} KiB a token, sent by each GPU")
    if stages > 1:
        print(f"  between stages    {model['stage_bytes_per_token'] / 2**10:8.1f} KiB a token")
    if "kv_tokens" in model:
        fits = "" if model["kv_tokens"] else ": the model does not fit"
        print(f"  room for          {model['kv_tokens']:8d} tokens on {model['gpu_bytes'] / 2**30:g} GiB{fits}")
    if "kv_sequences" in model:
        print(f"  room for          {model['kv_sequences']:8d} sequences on {model['gpu_bytes'] / 2**30:g} GiB")
    if "expected_of" in model:
        side_by_side = "" if model["engines"] == 1 else f" by {model['engines']} engines"
        # Experts' products take longer than their bytes and numbers say.
        how = f"at best, on {model['expected_of']}s" if model["experts"] else f"expected of {model['expected_of']}s"
        print(f"  next token        {model['expected_next_token_ms']:8.2f} ms of one request, {how}")
        print(f"  prefill           {model['expected_prefill_tokens_per_s']:8.0f} tokens/s{side_by_side}, {how}")
    print(f"  longest           {model['max_model_len']:8d} tokens")
    for item in made["media"]:
        used = ", ".join(f"{k} {v}" for k, v in item["used"].items() if not isinstance(v, list | tuple))
        print(f"  {item['modality']} {item['index'] + 1}: {item['tokens']} tokens ({used})")
        for loss in item["lost"]:
            print(f"    lost: {loss}")
    if made["media"]:
        mib = made["media_kv_bytes"] / 2**20
        print(f"  media in all      {made['media_tokens']:8d} tokens, {mib:.1f} MiB of KV cache")
