"""Further checkpoints that hold parts of a model: Family.secondary says which entries of config.json name them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from beheld.checkpoint.convert import family_of_config
from beheld.checkpoint.files import CONFIG, read_json
from beheld.checkpoint.hub import Repository
from beheld.checkpoint.quantized import stated
from beheld.checkpoint.weights import check_weights
from beheld.core.config import EngineArgs, SecondaryWeights
from beheld.core.errors import ModelError
from beheld.families import registry
from beheld.families.family import SecondaryCheckpoint


def secondary_weights(path: Path, args: EngineArgs) -> tuple[SecondaryWeights, ...]:
    """Return the secondary checkpoints of the one in `path`, of which at least the configuration is there.

    An entry names a folder, relative to `path` or absolute, or a hub repository. A repository's folder may also be
    next to `path` under its last name; otherwise it is fetched as the model's own would be.

    Raises:
        ModelError: one is neither found nor fetched; it says which entry names it, and what to do.
    """
    raw = read_json(path / CONFIG)
    found = ((part, _name(part, raw, args)) for part in registry.facts(family_of_config(raw)).secondary)
    return tuple(
        SecondaryWeights(name, str(_folder(part, name, path, args)), part.prefix, part.root)
        for part, name in found
        if name
    )


def described(raw: Mapping[str, Any], path: Path, args: EngineArgs) -> Mapping[str, Any]:
    """Return the content `raw` of the config.json in `path`, completed by those of its secondary checkpoints.

    Raises:
        ModelError: as `secondary_weights`, or the weights of one are quantized.
    """
    parts = registry.facts(family_of_config(raw)).secondary
    made = dict(raw)
    for part in parts:
        name = _name(part, raw, args)
        if not name:
            continue
        content = read_json(_folder(part, name, path, args) / CONFIG)
        if stated(content) is not None:
            raise ModelError(
                f"The weights of {name!r}, which {part.named_by} in config.json names, are quantized; a part from a "
                "second checkpoint cannot be.",
                f"Name an unquantized one: hf_overrides={{{part.named_by!r}: ...}}.",
            )
        made[part.described_in] = content
    return made


def fetch_secondary(path: Path, args: EngineArgs) -> None:
    """See to it that the weights of all secondary checkpoints are in their folders.

    Raises:
        ModelError: some are missing; it says which.
    """
    for part in secondary_weights(path, args):
        if _local(part.name, path) is not None:
            check_weights(Path(part.path), part.name)
        else:
            _repository(part.name, args).complete(Path(part.path))


def _name(part: SecondaryCheckpoint, raw: Mapping[str, Any], args: EngineArgs) -> str | None:
    """Return the name of a secondary checkpoint; None if the model's own checkpoint holds the part."""
    overrides = args.hf_overrides if isinstance(args.hf_overrides, Mapping) else {}
    name = overrides.get(part.named_by, raw.get(part.named_by))
    if name is not None and not isinstance(name, str):
        raise ModelError(
            f"{part.named_by} in config.json must be the name of a checkpoint, got {name!r}.", "Mend config.json."
        )
    return name or None


def _folder(part: SecondaryCheckpoint, name: str, path: Path, args: EngineArgs) -> Path:
    local = _local(name, path)
    if local is not None:
        return local
    remedy = (
        f"Fetch it (`hf download {name}`; log in if it is gated), put its folder next to the checkpoint's, or name a "
        f"folder: hf_overrides={{{part.named_by!r}: '/folder'}}."
    )
    needed = f"config.json names a second checkpoint with a part of the model, {part.named_by} {name!r}, and"
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise ModelError(f"{needed} there is no such folder.", remedy)
    try:
        return _repository(name, args).described()
    except ModelError as error:
        raise ModelError(f"{needed} it was not found: {error.reason}", remedy) from error


def _local(name: str, path: Path) -> Path | None:
    """Return the local folder of a secondary checkpoint; None if there is none."""
    sibling = path.resolve().parent / name.rsplit("/", 1)[-1]
    places = (path / Path(name).expanduser(), *((sibling,) if name.count("/") == 1 else ()))
    return next((place for place in places if (place / CONFIG).is_file()), None)


def _repository(name: str, args: EngineArgs) -> Repository:
    # The revision that the user names is the model's own.
    return Repository(name, None, args.download_dir, args.hf_token)
