"""From what the user called the model to a local folder that is one."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path

from beheld.checkpoint.files import CONFIG
from beheld.checkpoint.gguf.folder import described, in_layout, is_made
from beheld.checkpoint.gguf.header import SUFFIX, is_gguf
from beheld.checkpoint.hub import Repository
from beheld.checkpoint.secondary import fetch_secondary
from beheld.checkpoint.weights import check_weights
from beheld.core.config import EngineArgs
from beheld.core.errors import ModelError
from beheld.families import registry

_EMBEDDED = "mote"


def resolve(args: EngineArgs) -> Path:
    """The local folder of `args.model`: the embedded model, a folder, a GGUF file, or a repository of the hub.

    A short name of a family (`registry.short_names`) means a repository, unless a file or folder is called so.

    A GGUF file's folder is made of its metadata. `owner/name:TYPE` is the repository's file with this type of weights,
    which is fetched.

    The hub's cache is looked at first, the network only when the cache lacks a part of the repository. Its weights are
    not fetched here, but by `fetch_weights`: what the configuration says may be reason enough to refuse the model.

    Raises:
        ModelError: it is none of these, with what to do.
    """
    name = _named(args)
    if name is None:
        from beheld import mote

        return mote.path()
    given = Path(name).expanduser()
    if given.is_dir():
        layout = _layout(args, given)
        if layout:
            return in_layout(given, layout)
        if not (given / CONFIG).is_file():
            raise ModelError(
                f"The folder {name!r} is not a model: it has no {CONFIG}.",
                "Give the folder that holds config.json, the tokenizer and the weights.",
            )
        return given
    if given.is_file() and is_gguf(given):
        own = args.tokenizer in (None, name) and not args.skip_tokenizer_init
        return described(given, mmproj=args.mmproj, with_tokenizer=own)
    if given.exists():
        raise ModelError(f"{name!r} is a file.", "Give a GGUF file, the folder that holds the model, or a hub name.")
    kind = _gguf_kind(name)
    if kind is not None:
        file, vision = _gguf(args, name, kind)
        own = args.tokenizer in (None, args.model) and not args.skip_tokenizer_init
        return described(file, mmproj=args.mmproj or (str(vision) if vision else ""), with_tokenizer=own)
    if given.suffix.lower() == SUFFIX:
        raise ModelError(f"There is no file {name!r}.", "Check the spelling.")
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        near = get_close_matches(name.lower(), registry.short_names(), 1)
        raise ModelError(
            f"There is no folder {name!r}, and it is neither a hub name of the form owner/name nor a short name.",
            f"Did you mean {near[0]!r}?"
            if near
            else "See `beheld models --fits` for short names, check the spelling, or leave the model out (or say "
            f"{_EMBEDDED}) to use the embedded one.",
        )
    repository = _repository(args, name, args.revision)
    layout = _asked_layout(args)
    if not layout:
        others = () if args.config_format == "hf" else registry.layouts().values()
        folder = repository.described([known.file for _, known in others])
        layout = _layout(args, folder)
        if not layout:
            return folder
    _, known = registry.layouts()[layout]
    return in_layout(repository.whole(known.file, known.weights), layout)


def fetch_weights(args: EngineArgs, path: Path) -> None:
    """See to it that the weights are in `path`, which `resolve` gave; those of a hub repository are fetched.

    Those of secondary checkpoints are as well.

    With load_format="dummy" none are needed.

    Raises:
        ModelError: some are missing; it says which.
    """
    name = _named(args)
    if name is None or args.load_format == "dummy":
        return
    if _gguf_kind(name) is not None:
        # Its header had to be read.
        return
    fetch_secondary(path, args)
    if Path(name).expanduser().exists() or is_made(path):
        check_weights(path, name)
    else:
        _repository(args, name, args.revision).complete(path)


def resolve_tokenizer(args: EngineArgs, model_path: Path) -> Path:
    """The folder the tokenizer comes from: the model's own unless `args.tokenizer` names another.

    Raises:
        ModelError: the other is neither a folder nor a repository with a tokenizer.
    """
    if args.tokenizer is None or args.tokenizer == args.model:
        return model_path
    if Path(args.tokenizer).expanduser().is_dir():
        return Path(args.tokenizer).expanduser()
    return _repository(args, args.tokenizer, args.tokenizer_revision).tokenizer()


def pull(args: EngineArgs, tell: Callable[[str], None]) -> Path:
    """Fetch what the cache lacks of a repository, check its files, and return its folder.

    Args:
        tell: is given what is about to happen and what was found, in lines.

    Raises:
        ModelError: it is no repository, it could not be fetched, or a file is not what the hub says.
    """
    name = _named(args)
    if name is None or Path(name).expanduser().exists():
        raise ModelError(f"{args.model!r} is on this machine.", "Name a repository of the hub, or a short name.")
    kind = _gguf_kind(name)
    repository = _repository(args, name.partition(":")[0], args.revision)
    if name.count("/") == 1:
        tell(f"{name}, licence: {repository.licence() or 'none stated'}")
    if kind is not None:
        file, _ = _gguf(args, name, kind)
        tell(f"{repository.check(repository.snapshot() or file.parent)} files have the hashes that the hub states.")
        return file
    path = resolve(args)
    fetch_weights(args, path)
    count = repository.check(repository.snapshot() or path)
    tell(f"{count} files have the hashes that the hub states.")
    return path


def layouts() -> tuple[str, ...]:
    """The names by which options call publishers' layouts."""
    return tuple(registry.layouts())


def _layout(args: EngineArgs, folder: Path) -> str:
    """Return the publisher's layout in which a folder is read; empty for transformers' own.

    Raises:
        ModelError: a layout is asked for that the folder does not have.
    """
    asked = _asked_layout(args)
    if asked:
        _, layout = registry.layouts()[asked]
        if not (folder / layout.file).is_file():
            raise ModelError(
                f"The folder {args.model!r} has no {layout.file}.", "Leave config_format and load_format out."
            )
        return asked
    if (folder / CONFIG).is_file() or args.config_format == "hf":
        return ""
    return next((name for name, (_, layout) in registry.layouts().items() if (folder / layout.file).is_file()), "")


def _asked_layout(args: EngineArgs) -> str:
    """Return the publisher's layout that the options name, if any."""
    return next((name for name in (args.config_format, args.load_format) if name in registry.layouts()), "")


def _named(args: EngineArgs) -> str | None:
    """The model that was named; None for the embedded one, unless a folder happens to be called as it is."""
    name = args.model
    if name is None or Path(name).exists() or "/" in name:
        return name
    if name == _EMBEDDED:
        return None
    short = registry.short_names().get(name.lower())
    return name if short is None else short.repository


def _gguf_kind(name: str) -> str | None:
    """Return the type of weights in `owner/name:TYPE`, which means a GGUF file of a repository; None without one."""
    repository, mark, kind = name.partition(":")
    is_one = bool(mark and kind) and repository.count("/") == 1 and not Path(name).expanduser().exists()
    return kind if is_one and "/" not in kind else None


def _gguf(args: EngineArgs, name: str, kind: str) -> tuple[Path, Path | None]:
    """Return the GGUF file, fetched, and that of its vision part, if it has one and none is named."""
    return _repository(args, name.partition(":")[0], args.revision).gguf(kind, mmproj=args.mmproj is None)


def _repository(args: EngineArgs, name: str, revision: str | None) -> Repository:
    return Repository(name, revision, args.download_dir, args.hf_token)
