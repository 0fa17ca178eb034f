"""A repository of the Hugging Face hub: what the cache holds of it, and fetching what is missing there."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, TypeVar

from beheld.checkpoint.files import CONFIG, read_json
from beheld.checkpoint.hub_errors import explained
from beheld.checkpoint.weights import check_weights, chosen, has_weights, lacking, shown
from beheld.core.errors import ModelError
from beheld.utils.log import get_logger, once

logger = get_logger(__name__)
T = TypeVar("T")

# What neither describes a model nor reads text or media for it.
_WEIGHTS = (
    *("*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.ot", "*.gguf", "*.ggml", "*.npz"),
    *("*.onnx", "*.onnx_data*", "*.tflite", "*.mlmodel", "*.engine", "*.nemo", "*.pkl", "*.tar*", "*.zip"),
    *("consolidated*", "original/*", "onnx/*", "openvino/*", "coreml/*", "*.mlpackage/*"),
)
_SHOW = (
    *("*.md", "*.pdf", "*.png", "*.jpg", "*.jpeg", "*.gif", "*.webp", "*.svg", "*.mp4", "*.webm", "*.mov", "*.avi"),
    *("*.wav", "*.mp3", "*.flac", "*.ogg", ".git*"),
)
# A tokenizer's vocabularies, any one of which makes a tokenizer; its settings; and the code of its own.
_VOCABULARIES = (
    *("tokenizer.json", "tekken.json", "vocab.json", "vocab.txt", "*.model", "*.tiktoken", "*.spm", "*.vocab"),
    "bpe.codes",
)
_PROCESSORS = ("preprocessor_config.json", "processor_config.json")


@dataclass(frozen=True)
class Wanted:
    """Which files of a repository to fetch: patterns as the hub's own library takes them, over whole names."""

    allow: Sequence[str] = ("*",)
    ignore: Sequence[str] = ()

    def among(self, names: Iterable[str]) -> list[str]:
        """Those of `names` that would be fetched."""
        return [name for name in names if _fits(name, self.allow) and not _fits(name, self.ignore)]


_SMALL = Wanted(ignore=(*_WEIGHTS, *_SHOW))
_TOKENIZER = Wanted(
    allow=(
        *_VOCABULARIES,
        *("tokenizer*", "tokenization*", "special_tokens_map.json", "added_tokens.json", "merges*", "vocab*"),
        *("config.json", "chat_template*", "additional_chat_templates/*", "*.jinja", "*.py"),
    ),
    ignore=_SMALL.ignore,
)


@dataclass(frozen=True)
class Repository:
    """A repository at a revision, as the user named it.

    Attributes:
        name: owner/name.
        revision: branch, tag or commit; None for the main branch.
        cache_dir: where repositories are kept; None for the hub's own cache.
        token: the key for the hub; True or None for the one that was stored.
    """

    name: str
    revision: str | None
    cache_dir: str | None
    token: bool | str | None

    def described(self, signs: Sequence[str] = ()) -> Path:
        """The folder with everything but the weights: configuration, tokenizer, processor, templates.

        The cache is enough if nothing of it is missing there. Programs that fetch file by file leave a part of a
        repository in it; then the hub is asked for the rest.

        Args:
            signs: files of publishers' layouts; one of them is enough where there is no config.json.

        Raises:
            ModelError: there is no such repository, or it cannot be reached and the cache lacks its configuration.
        """
        folder = self._cached((CONFIG, *signs))
        if folder is not None and self._is_described(folder):
            return folder
        try:
            folder = self._fetch(self.revision, _SMALL)
        except Exception as error:
            if folder is None:
                raise self._unreachable(error) from error
            once(logger, logging.WARNING, self._in_part(folder, error))
        if not any((folder / sign).is_file() for sign in (CONFIG, *signs)):
            raise ModelError(
                f"The repository {self.name!r} is not a model of transformers' layout: it has no {CONFIG}.",
                "Give a repository or a folder that holds config.json, the tokenizer and the weights.",
            )
        return folder

    def whole(self, sign: str, weights: str) -> Path:
        """The folder with everything of a publisher's layout, the weights too; what the cache lacks is fetched.

        Args:
            sign: the file that a checkpoint of this layout has.
            weights: the pattern of its files of weights.

        Raises:
            ModelError: the repository has no such files, or they could not be fetched.
        """
        folder = self._cached((sign,))
        names = [] if folder is None else (self._listed(folder) or [])
        wanted = Wanted((sign, *_TOKENIZER.allow, weights, f"{weights}.index.json"))
        if folder is not None and names and _all_there(folder, wanted.among(names)):
            return folder
        try:
            folder = self._fetch(self.revision, wanted)
        except Exception as error:
            if folder is None or next(folder.glob(weights), None) is None:
                raise self._unreachable(error) from error
            once(logger, logging.WARNING, self._in_part(folder, error))
        if not (folder / sign).is_file():
            raise ModelError(f"The repository {self.name!r} has no {sign}.", "Leave config_format and load_format out.")
        return folder

    def _unreachable(self, error: Exception) -> ModelError:
        sentence = f"The model {self.name!r} is neither in the local cache nor could it be fetched"
        return explained(sentence, error, self.name)

    def complete(self, folder: Path) -> None:
        """Fetch the weights that `folder`, which `described` gave, lacks.

        Raises:
            ModelError: some are missing and could not be fetched, or the repository has none; it says which.
        """
        absent = lacking(folder)
        if not absent:
            return
        try:
            files = chosen(self._names(folder), folder)
            if files:
                self._fetch(folder.name, Wanted([_literally(file) for file in files]))
        except ModelError:
            raise
        except Exception as error:
            lacks = f"The local cache lacks weights of the model {self.name!r} ({shown(absent)})"
            failure = explained(f"{lacks}, and they could not be fetched", error, self.name)
            raise ModelError(
                failure.reason,
                f"{failure.remedy} Files that are there are not fetched again.",
            ) from error
        if not files:
            raise ModelError(
                f"The repository {self.name!r} holds no weights that transformers' classes read (model.safetensors, "
                "its shards, or pytorch_model.bin).",
                "Give a repository in transformers' own layout, or load_format='dummy' for random weights.",
            )
        check_weights(folder, self.name)

    def gguf(self, kind: str, mmproj: bool) -> tuple[Path, Path | None]:
        """Return the GGUF file of the repository whose name ends with `kind`, such as Q4_K_M, and its vision part's.

        The cache is enough if such a file is there.

        Args:
            mmproj: whether the vision part's file is wanted, if there is one.

        Raises:
            ModelError: the repository has no such file or several, or it could not be fetched.
        """
        folder = self.snapshot()
        here = [] if folder is None else sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*.gguf"))
        if folder is not None and _of_kind(here, kind):
            names = self._listed(folder) or here
            wanted = _chosen_gguf(names, kind, mmproj)
            if all((folder / name).is_file() for name in wanted):
                return _as_pair(folder, wanted)
        listed = self._asked(lambda api: list(api.list_repo_tree(self.name, recursive=True, revision=self.revision)))
        names = [each.path for each in listed]
        wanted = _chosen_gguf(names, kind, mmproj)
        if not wanted:
            kinds = [Path(name).stem for name in names if name.endswith(".gguf") and not _is_mmproj(name)]
            count = "several files" if _of_kind(names, kind) else "no GGUF file"
            raise ModelError(
                f"The repository {self.name!r} has {count} whose name ends with {kind!r}.",
                f"It has {', '.join(kinds)}." if kinds else "Name a repository with GGUF files.",
            )
        try:
            return _as_pair(self._fetch(self.revision, Wanted([_literally(name) for name in wanted])), wanted)
        except Exception as error:
            raise explained(f"{wanted[0]!r} could not be fetched", error, self.name) from error

    def snapshot(self) -> Path | None:
        """The cached folder of this revision, whatever is in it."""
        from huggingface_hub import constants, file_download

        root = Path(self.cache_dir or constants.HF_HUB_CACHE)
        root /= file_download.repo_folder_name(repo_id=self.name, repo_type="model")
        revision = self.revision or "main"
        named = root / "refs" / revision
        folder = root / "snapshots" / (named.read_text().strip() if named.is_file() else revision)
        return folder if folder.is_dir() else None

    def licence(self) -> str | None:
        """Return the licence that the repository's card states; None if it states none.

        Raises:
            ModelError: the hub cannot be asked.
        """
        info = self._asked(lambda api: api.model_info(self.name, revision=self.revision))
        card = info.card_data or {}
        name = card.get("license_name") if card.get("license") == "other" else card.get("license")
        return str(name or card.get("license")) if card.get("license") else None

    def check(self, folder: Path) -> int:
        """Compare the files in `folder` with the hashes that the hub states, and return how many there are.

        A file that differs is removed, so that the next download fetches it.

        Raises:
            ModelError: a file differs, or the hub cannot be asked.
        """
        listed = self._asked(lambda api: list(api.list_repo_tree(self.name, recursive=True, revision=folder.name)))
        files = [each for each in listed if hasattr(each, "blob_id") and (folder / each.path).is_file()]
        wrong = [each.path for each in files if not _has_hash(folder / each.path, each)]
        if wrong:
            for path in wrong:
                _remove(folder / path, folder.parents[1] / "blobs")
            raise ModelError(
                f"Files of {self.name!r} are not what the hub states: {shown(wrong)}.",
                "They were removed. Pull again; if they differ again, what stands between this machine and the hub "
                "changes them.",
            )
        return len(files)

    def tokenizer(self) -> Path:
        """The folder with the files of the tokenizer; of nothing else, unless the cache has more.

        Raises:
            ModelError: there are none, or they could not be fetched.
        """
        folder = self._cached((CONFIG, "tokenizer_config.json", *_VOCABULARIES[:4], "tokenizer.model"))
        if folder is not None and self._is_tokenizer(folder):
            return folder
        try:
            folder = self._fetch(self.revision, _TOKENIZER)
        except Exception as error:
            sentence = f"The tokenizer {self.name!r} is neither in the local cache nor could it be fetched"
            raise explained(sentence, error, self.name) from error
        if not _has_vocabulary(folder):
            raise ModelError(
                f"The repository {self.name!r} holds no tokenizer.", "Name another with `tokenizer`, or leave it out."
            )
        return folder

    def _cached(self, signs: Sequence[str]) -> Path | None:
        """The cached folder of this revision, if one of the files `signs` is in it."""
        import huggingface_hub

        for sign in signs:
            try:
                found = huggingface_hub.try_to_load_from_cache(self.name, sign, self.cache_dir, self.revision)
            except ValueError as error:
                raise ModelError(
                    f"{self.name!r} is not a valid hub name: {error}.", "Names have the form owner/name."
                ) from error
            if isinstance(found, str):
                return Path(found).parent
        return None

    def _is_described(self, folder: Path) -> bool:
        names = self._listed(folder)
        if names is not None:
            return _all_there(folder, _SMALL.among(names))
        if not (folder / CONFIG).is_file():
            return False
        # The repository's file list is unknown. A folder with weights, vocabulary and processors was fetched
        # completely.
        config = read_json(folder / CONFIG)
        parts = {name for name, value in config.items() if name.endswith("_config") and isinstance(value, dict)}
        seen = parts - {"text_config", "generation_config", "quantization_config"}
        reads = not seen or any((folder / name).is_file() for name in _PROCESSORS)
        return has_weights(folder) and _has_vocabulary(folder) and reads

    def _in_part(self, folder: Path, error: Exception) -> str:
        """In words, that the hub could not be asked for what the folder lacks."""
        names = self._listed(folder)
        absent = [name for name in _SMALL.among(names or ()) if not (folder / name).is_file()]
        what = f"lacks {shown(absent)}" if absent else "may lack files"
        return (
            f"The local cache of {self.name!r} {what}, and the hub cannot be asked for them ({type(error).__name__})."
        )

    def _is_tokenizer(self, folder: Path) -> bool:
        names = self._listed(folder)
        return _has_vocabulary(folder) if names is None else _all_there(folder, _TOKENIZER.among(names))

    def _listed(self, folder: Path) -> list[str] | None:
        """The repository's files, if a download has written them down; the hub is not asked."""
        try:
            from huggingface_hub import get_cached_repo_tree
            from huggingface_hub.errors import CachedRepoTreeNotFoundError
        except ImportError:
            # Older releases, which the oldest transformers also takes, write nothing down.
            return None
        try:
            found = get_cached_repo_tree(self.name, revision=folder.name, cache_dir=self.cache_dir)
        except (CachedRepoTreeNotFoundError, ValueError):
            return None
        return [file.path for file in found]

    def _names(self, folder: Path) -> list[str]:
        """The repository's files; the hub is asked only if no download has written them down."""
        import huggingface_hub

        known = self._listed(folder)
        if known is not None:
            return known
        return huggingface_hub.HfApi(token=self.token).list_repo_files(self.name, revision=folder.name)

    def _asked(self, question: Callable[[Any], T]) -> T:
        import huggingface_hub

        try:
            return question(huggingface_hub.HfApi(token=self.token))
        except Exception as error:
            raise explained(f"The hub cannot be asked about {self.name!r}", error, self.name) from error

    def _fetch(self, revision: str | None, wanted: Wanted) -> Path:
        import huggingface_hub

        return Path(
            huggingface_hub.snapshot_download(
                self.name,
                revision=revision,
                cache_dir=self.cache_dir,
                token=self.token,
                allow_patterns=list(wanted.allow),
                ignore_patterns=list(wanted.ignore),
            )
        )


def _is_mmproj(name: str) -> bool:
    return "mmproj" in name.lower()


def _of_kind(names: Iterable[str], kind: str) -> list[str]:
    """Return the text models' files whose names end with the name of a type of weights."""
    ends = [f"{mark}{kind}.gguf".lower() for mark in "-._/"]
    return [name for name in names if not _is_mmproj(name) and (f"/{name}".lower().endswith(tuple(ends)))]


def _chosen_gguf(names: Sequence[str], kind: str, mmproj: bool) -> list[str]:
    """Return the one file of a kind, then that of the vision part; none if there is not exactly one."""
    found = _of_kind(names, kind)
    if len(found) != 1:
        return []
    visions = sorted(name for name in names if _is_mmproj(name) and name.endswith(".gguf"))
    # float16 where there are several: every device converts it.
    halves = [name for name in visions if name.lower().endswith("f16.gguf") and not name.lower().endswith("bf16.gguf")]
    return found + ((halves or visions)[:1] if mmproj else [])


def _as_pair(folder: Path, names: Sequence[str]) -> tuple[Path, Path | None]:
    return folder / names[0], folder / names[1] if len(names) > 1 else None


def _has_hash(path: Path, file: Any) -> bool:
    """Return whether a file has the hash of the hub's entry: that of its content, or of git's object of it."""
    if file.lfs is not None:
        with path.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest() == str(file.lfs.sha256)
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest() == str(file.blob_id)


def _remove(path: Path, contents: Path) -> None:
    """Remove a file of the cache, and what it links to among the repository's `contents`: a download links that again.

    What a user's own link leads to outside of them stays.
    """
    content = path.resolve()
    path.unlink()
    if content.parent == contents.resolve():
        content.unlink(missing_ok=True)


def _fits(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def _all_there(folder: Path, names: Iterable[str]) -> bool:
    return all((folder / name).is_file() for name in names)


def _has_vocabulary(folder: Path) -> bool:
    names = [file.name for file in folder.iterdir() if file.is_file()]
    return any(_fits(name, _VOCABULARIES) for name in names)


def _literally(name: str) -> str:
    """A pattern that matches this name alone."""
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)
