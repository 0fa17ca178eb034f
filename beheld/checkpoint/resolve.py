"""From what the user called the model to a local folder that is one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from beheld.core.config import EngineArgs
from beheld.core.errors import ModelError

CONFIG = "config.json"
WEIGHT_PATTERNS = ("*.safetensors", "*.bin", "*.pt", "*.pth")


def resolve(args: EngineArgs) -> Path:
    """The local folder of `args.model`: the embedded model, a folder, or a repository of the Hugging Face hub.

    The hub's cache is looked at first, the network only when the cache lacks the repository.

    Raises:
        ModelError: it is none of these, with what to do.
    """
    if args.model is None:
        from beheld import mote

        return mote.path()
    given = Path(args.model).expanduser()
    if given.is_dir():
        if not (given / CONFIG).is_file():
            raise ModelError(
                f"The folder {args.model!r} is not a model: it has no {CONFIG}.",
                "Give the folder that holds config.json, the tokenizer and the weights.",
            )
        return given
    if given.exists():
        raise ModelError(f"{args.model!r} is a file.", "Give the folder that holds the model, or a hub name.")
    if args.model.startswith((".", "/", "~")) or args.model.count("/") != 1:
        raise ModelError(
            f"There is no folder {args.model!r}, and it is not a hub name of the form owner/name.",
            "Check the spelling, or leave the model out to use the embedded one.",
        )
    return _from_hub(args, args.model, args.revision)


def resolve_tokenizer(args: EngineArgs, model_path: Path) -> Path:
    """The folder the tokenizer comes from: the model's own unless `args.tokenizer` names another."""
    if args.tokenizer is None or args.tokenizer == args.model:
        return model_path
    if Path(args.tokenizer).expanduser().is_dir():
        return Path(args.tokenizer).expanduser()
    return _from_hub(args, args.tokenizer, args.tokenizer_revision)


def _from_hub(args: EngineArgs, name: str, revision: str | None) -> Path:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    options: dict[str, Any] = {"revision": revision, "cache_dir": args.download_dir, "token": args.hf_token}
    ignore = ["*.bin", "*.pt", "*.pth", "*.h5", "*.msgpack", "*.gguf", "original/*", "*.onnx"]
    try:
        path = Path(huggingface_hub.snapshot_download(name, local_files_only=True, **options))
        if (path / CONFIG).is_file():
            return path
    except LocalEntryNotFoundError:
        pass
    except ValueError as error:
        raise ModelError(f"{name!r} is not a valid hub name: {error}.", "Names have the form owner/name.") from error
    try:
        return Path(huggingface_hub.snapshot_download(name, ignore_patterns=ignore, **options))
    except Exception as error:
        raise ModelError(
            f"The model {name!r} is neither in the local cache nor could it be fetched ({type(error).__name__}).",
            "Check the name and the network, log in if it is gated, or give a local folder.",
        ) from error


def has_weights(path: Path) -> bool:
    """True if the folder holds a file of weights."""
    return any(next(path.glob(pattern), None) is not None for pattern in WEIGHT_PATTERNS)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`, or an empty one if there is no such file.

    Raises:
        ModelError: the file is not a JSON object.
    """
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ModelError(f"{path.name} cannot be read: {error}.", "Fetch the checkpoint again.") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path.name} is not a JSON object.", "Fetch the checkpoint again.")
    return value
