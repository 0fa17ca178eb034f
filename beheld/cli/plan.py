"""`beheld plan MODEL MEDIA...`: tokens per item and memory, computed from the configuration without the weights."""

from __future__ import annotations

import argparse
import json
from typing import Any

from beheld.cli.media import references
from beheld.core.config import EngineArgs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("model", metavar="MODEL", help="a folder, a GGUF file, a hub name, or mote")
    parser.add_argument("media", nargs="*", metavar="MEDIA", help="files, URLs, or -")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--trust-remote-code", action="store_true")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the plan."""
    import os

    os.environ.setdefault("BEHELD_LOG_LEVEL", "WARNING")
    from beheld.tools.plan import plan

    args = EngineArgs(model=arguments.model, trust_remote_code=arguments.trust_remote_code)
    made = plan(args, references(arguments.media))
    if arguments.json:
        print(json.dumps(made))
    else:
        _print(made)
    return 0


def _print(made: dict[str, Any]) -> None:
    model = made["model"]
    print(f"{model['name']}: {model['architecture']}, {model['parameters'] / 1e9:.3f} B parameters, {model['dtype']}")
    print(f"  weights           {model['weights_bytes'] / 2**30:8.3f} GiB")
    print(f"  KV cache          {model['kv_bytes_per_token'] / 2**10:8.1f} KiB a token")
    if model["state_bytes_per_sequence"]:
        mib = model["state_bytes_per_sequence"] / 2**20
        print(f"  recurrent state   {mib:8.1f} MiB a sequence, and as much a kept prefix")
    print(f"  longest           {model['max_model_len']:8d} tokens")
    for item in made["media"]:
        used = ", ".join(f"{k} {v}" for k, v in item["used"].items() if not isinstance(v, list | tuple))
        print(f"  {item['modality']} {item['index'] + 1}: {item['tokens']} tokens ({used})")
        for loss in item["lost"]:
            print(f"    lost: {loss}")
    if made["media"]:
        mib = made["media_kv_bytes"] / 2**20
        print(f"  media in all      {made['media_tokens']:8d} tokens, {mib:.1f} MiB of KV cache")
