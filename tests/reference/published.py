"""What recorders of models' own published code share; runs in the environment of that code, without this project."""

from __future__ import annotations

import argparse
import json
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

PACKAGE = "published"
# Values that are kept of an array.
KEPT = 24
# What answers one case of cases.json.
Answer = Callable[[dict[str, Any]], dict[str, Any]]


def load_code(
    code: Path, family: str, names: tuple[str, ...], edited: Callable[[str, str], str]
) -> dict[str, types.ModuleType]:
    """Import the modules NAME_FAMILY.py of the folder `code`, or NAME.py where there is none, in this order.

    Args:
        edited: makes the source that is run from a module's name and its source.
    """
    package = types.ModuleType(PACKAGE)
    package.__path__ = [str(code)]
    sys.modules[PACKAGE] = package
    found = {}
    for name in names:
        stem = f"{name}_{family}" if (code / f"{name}_{family}.py").is_file() else name
        source = edited(name, (code / f"{stem}.py").read_text(encoding="utf-8"))
        full = f"{PACKAGE}.{stem}"
        module = types.ModuleType(full)
        module.__package__ = PACKAGE
        sys.modules[full] = module
        exec(compile(source, full, "exec"), module.__dict__)
        found[name] = module
    return found


def greedy(model: Any, ids: Any, max_tokens: int, seen: Mapping[str, Any]) -> dict[str, Any]:
    """Return the greedy answer to ids (1, N) and its log-probabilities, computed without a cache."""
    import torch

    tokens: list[int] = []
    logprobs: list[float] = []
    with torch.inference_mode():
        for _ in range(max_tokens):
            logits = model(input_ids=ids, use_cache=False, **seen).logits[0, -1].double().log_softmax(-1)
            tokens.append(int(logits.argmax()))
            logprobs.append(round(float(logits.max()), 6))
            ids = torch.cat([ids, torch.tensor([tokens[-1:]])], dim=1)
    return {"token_ids": tokens, "logprobs": logprobs}


def probe(values: Any) -> dict[str, Any]:
    """Return an array's shape, its norm, and values that are evenly spaced in it."""
    flat = values.detach().double().flatten()
    kept = [int(index * (len(flat) - 1) / (KEPT - 1)) for index in range(KEPT)]
    return {
        "shape": list(values.shape),
        "norm": round(float(flat.norm()), 4),
        "values": [round(float(flat[index]), 5) for index in kept],
    }


def seen(pixels: list[Any], embeds: list[Any], tiles: Sequence[Any] = ()) -> dict[str, Any]:
    """Return what is recorded of a case with media; nothing where there are none.

    Args:
        pixels: what the towers receive of each item, of any number of leading dimensions.
        embeds: (N, H) what takes the place of its placeholders, in their order.
        tiles: what they receive of each item's tiles, where those are apart from it.
    """
    import torch

    if not embeds:
        return {}
    found = {"pixels": probe(torch.cat(pixels)), "embeds": probe(torch.cat(embeds))}
    return found | ({"tiles": probe(torch.cat(tuple(tiles)))} if sum(map(len, tiles)) else {})


def read_checkpoint(folder: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any], Any]:
    """Return config.json, preprocessor_config.json, the weights in float32 and the tokenizer of `folder`/checkpoint."""
    import transformers

    checkpoint = folder / "checkpoint"
    config, pixels = (
        json.loads((checkpoint / f"{name}.json").read_text(encoding="utf-8"))
        for name in ("config", "preprocessor_config")
    )
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(checkpoint / "tokenizer.json"))
    return config, pixels, read_weights(folder), tokenizer


def read_weights(folder: Path) -> dict[str, Any]:
    """Return the weights of `folder`/checkpoint in float32."""
    from safetensors.torch import load_file

    stored = load_file(folder / "checkpoint" / "model.safetensors")
    return {name: weight.float() for name, weight in stored.items()}


def settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of config.json that the published configuration takes."""
    return {key: value for key, value in config.items() if key not in ("vision_config", "torch_dtype", "auto_map")}


def record(
    family: str,
    answers: Callable[[Path, Path], Answer],
    about: str,
    further: Callable[[Path, Path], dict[str, Any]] | None = None,
    chosen: Callable[[dict[str, Any]], bool] = lambda case: True,
) -> None:
    """Read the command line FOLDER CODE OUTPUTS.json, answer the folder's cases, write the outputs.

    Args:
        answers: makes, from the folder and the code's folder, what answers one case of cases.json.
        about: the recorder's docstring.
        further: makes, from the same, further entries of the outputs.
        chosen: whether a case is answered.
    """
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    for name in ("folder", "code", "outputs"):
        parser.add_argument(name, type=Path)
    options = parser.parse_args()

    import transformers

    answer = answers(options.folder, options.code)
    found = {}
    for case in filter(chosen, json.loads((options.folder / "cases.json").read_text(encoding="utf-8"))):
        found[case["name"]] = answer(case)
        print(case["name"], found[case["name"]]["token_ids"], flush=True)
    told = {"reference": f"the published code of {family}", "transformers": transformers.__version__, "options": {}}
    told |= {} if further is None else further(options.folder, options.code)
    text = json.dumps(told | {"cases": found}, separators=(",", ":"), ensure_ascii=False)
    options.outputs.write_text(text + "\n", encoding="utf-8")
