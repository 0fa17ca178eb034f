"""Reads a LoRA adapter in PEFT's format from a folder, and refuses what it cannot apply exactly.

Shapes: I inputs and O outputs of a layer, r the adapter's rank in that layer.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import regex
import torch
from blake3 import blake3
from torch import Tensor

from beheld.core.errors import LoRAError, LoRAMissingError
from beheld.parallel.shards import Cut

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"

# The wrapper's prefix, the layer's path, which matrix, and, in some files, the adapter's name.
_KEY = re.compile(r"(?:base_model\.model\.)?(?P<path>.+)\.lora_(?P<which>[AB])(?:\.(?P<own>[^.]+))?\.weight")
# Fields that matter only to training, or only describe. All other fields must have no effect.
_DESCRIBING = frozenset(
    {
        *("auto_mapping", "base_model_name_or_path", "exclude_modules", "inference_mode", "layers_pattern"),
        *("layers_to_transform", "lora_dropout", "peft_version", "qalora_group_size", "revision", "runtime_config"),
        *("target_modules", "task_type", "eva_config", "megatron_core"),
    }
)
_APPLIED = frozenset({"alpha_pattern", "lora_alpha", "peft_type", "r", "rank_pattern", "use_rslora"})
# Initializations that leave the base weights unchanged; the others modify them.
_PLAIN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_HEADER_BYTES = 64 << 20
# Of the header of the weights: for each of a site's two matrices one line, and their metadata.
_LINE_BYTES, _METADATA_BYTES = 1 << 10, 1 << 20
# Seconds of the processor for all patterns of ranks and scales: a pattern of a few letters may take for ever.
PATTERNS_S = 1.0
_SHOWN = 128

# Per existing file: its name, inode number, size and time.
Stamp = tuple[tuple[str, int, int, int], ...]


@dataclass(frozen=True)
class Site:
    """A linear layer that can carry an adapter: its path below the decoder, its inputs and its outputs.

    Attributes:
        cut: of its weight (O, I), the part of this rank; None if it has all.
    """

    name: str
    num_inputs: int
    num_outputs: int
    cut: Cut | None = None

    def own(self, down_rI: Tensor, up_Or: Tensor) -> tuple[Tensor, Tensor]:
        """Return this rank's part of the matrices: some inputs of one, or some outputs of the other."""
        if self.cut is None:
            return down_rI, up_Or
        if self.cut.dim == 0:
            return down_rI, self.cut.of(up_Or, up_Or.shape)
        return self.cut.of(down_rI, down_rI.shape), up_Or


@dataclass(frozen=True, eq=False)
class LoRAWeights:
    """An adapter that was read and fits the model.

    Attributes:
        name: as in its request.
        digest: of its configuration and weights, 32 bytes.
        matrices: site name -> matrix (r, I) into the rank, and matrix (O, r) out of it, already scaled.
    """

    name: str
    digest: bytes
    matrices: Mapping[str, tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Form:
    """The model's requirements for an adapter.

    Attributes:
        sites: the layers that can carry an adapter, by name.
        prefixes: what may precede a site's name in a file: the decoder's path in this model, and its path in older
            versions of transformers.
        max_rank: the largest rank.
        dtype: of the activations.
        published: returns the layers that one of the checkpoint's own layout becomes, by path, with the rows of the
            matrix (O, r) that each has; None if the layout is this model's.
    """

    sites: Mapping[str, Site]
    prefixes: tuple[str, ...]
    max_rank: int
    dtype: torch.dtype
    published: Callable[[str, Tensor], Mapping[str, Tensor]] | None = None

    @property
    def max_file_bytes(self) -> int:
        """Return an upper bound on an adapter's bytes: the largest rank on all sites, in float64."""
        values = sum(self.max_rank * (site.num_inputs + site.num_outputs) for site in self.sites.values())
        return 8 * values + _HEADER_BYTES

    @property
    def max_header_bytes(self) -> int:
        """Return an upper bound on the bytes that say which matrices there are."""
        return 2 * _LINE_BYTES * len(self.sites) + _METADATA_BYTES

    def site(self, path: str) -> Site | None:
        """Return the site of a layer's path in a file."""
        for prefix in self.prefixes:
            if path.startswith(prefix) and path[len(prefix) :] in self.sites:
                return self.sites[path[len(prefix) :]]
        return None

    def parts(self, path: str, up_Or: Tensor) -> list[tuple[Site, Tensor]]:
        """Return the sites of a layer's path in a file, each with its rows of the matrix; none if it is unknown."""
        site = self.site(path)
        if site is not None:
            return [(site, up_Or)]
        if self.published is None or up_Or.dim() != 2:
            return []
        try:
            found = self.published(path, up_Or)
        except Exception:
            # Rules of the loader check nothing: the matrix has other sizes than the checkpoint's weight.
            return []
        made = [(self.site(place), part) for place, part in found.items()]
        return [(site, part) for site, part in made if site is not None] if all(site for site, _ in made) else []


@dataclass(frozen=True)
class _Scales:
    """Ranks and scales from adapter_config.json, by layer path.

    Attributes:
        until: seconds that the thread has computed when matching ends.
    """

    rank: int
    alpha: float
    rank_pattern: Mapping[str, Any]
    alpha_pattern: Mapping[str, Any]
    rooted: Any
    until: float

    def of(self, path: str) -> tuple[Any, Any]:
        """Return a layer's rank and scale.

        The scale is alpha / rank, or alpha / sqrt(rank) (rank-stabilised LoRA, arXiv 2312.03732).

        Raises:
            TimeoutError: the patterns take too long.
        """
        rank = _matching(self.rank_pattern, path, self.rank, self.until)
        alpha = _matching(self.alpha_pattern, path, self.alpha, self.until)
        return rank, alpha / (math.sqrt(rank) if self.rooted else rank)


def load(name: str, folder: str, form: Form) -> LoRAWeights:
    """Read the adapter in `folder` to host memory, in the form's dtype, scaled.

    Raises:
        LoRAError: the folder is missing, holds no adapter, or holds one for another model; the message says which and
            what to do.
    """
    path = _folder(name, folder)
    said = _bytes(name, path / CONFIG, 1 << 20)
    config = _config(name, said)
    body = _bytes(name, path / WEIGHTS, form.max_file_bytes)
    pairs = _pairs(name, _tensors(name, body, form.max_header_bytes))
    scales = _scales(name, config, form.max_rank)
    matrices: dict[str, tuple[Tensor, Tensor]] = {}
    for where, (down_rI, up_Or) in pairs.items():
        parts = form.parts(where, up_Or)
        if not parts:
            raise LoRAError(
                f"{WEIGHTS} of the adapter {name!r} changes {_shown(where)}, which is not a linear layer of this "
                "language model.",
                f"It was made for {_base(config)}. Train it with target_modules that name only such layers, or merge "
                "it into the model.",
            )
        rank, scale = _scale_of(name, scales, where)
        for site, part_Or in parts:
            if site.name in matrices:
                raise LoRAError(f"{WEIGHTS} of the adapter {name!r} changes {site.name!r} twice.", "Save it again.")
            _check_shapes(name, site, down_rI, part_Or, rank, form.max_rank, config)
            matrices[site.name] = site.own(*_ready(name, where, down_rI, part_Or, scale, form.dtype))
    _check_targets(name, config, form, matrices)
    return LoRAWeights(name, blake3(blake3(said).digest() + blake3(body).digest()).digest(), matrices)


def stamp(folder: str) -> Stamp:
    """Return a value that changes when the adapter's files do; unreadable files are left out."""
    found = []
    for name in (CONFIG, WEIGHTS):
        try:
            stat = (Path(folder).expanduser() / name).stat()
        except (OSError, ValueError, RuntimeError):
            continue
        found.append((name, stat.st_ino, stat.st_size, stat.st_mtime_ns))
    return tuple(found)


def _folder(name: str, folder: str) -> Path:
    if "://" in folder:
        raise LoRAError(
            f"The adapter {name!r} is given by a URL, {folder[:128]!r}.",
            "Fetch it and give its folder.",
            param="lora_path",
        )
    path = Path(folder).expanduser()
    try:
        found = bool(folder) and path.is_dir()
    except (OSError, ValueError):
        found = False
    if not found:
        raise LoRAMissingError(
            f"The folder {folder[:256]!r} of the adapter {name!r} does not exist.",
            f"Give the folder that holds {CONFIG} and {WEIGHTS}.",
        )
    if not (path / WEIGHTS).is_file() and any(path.glob("adapter_model.*")):
        raise LoRAError(
            f"The adapter {name!r} has no {WEIGHTS}; pickled weights are not supported.",
            "Save it as safetensors (save_pretrained of peft does).",
        )
    return path


def _bytes(name: str, file: Path, most: int) -> bytes:
    try:
        if file.exists() and not file.is_file():
            # Opening a named pipe would wait for ever.
            raise OSError
        with file.open("rb") as opened:
            body = opened.read(most + 1)
    except OSError as error:
        raise LoRAError(
            f"The adapter {name!r} has no readable {file.name} ({type(error).__name__}).",
            f"Its folder must hold {CONFIG} and {WEIGHTS}.",
        ) from error
    if len(body) > most:
        raise LoRAError(
            f"{file.name} of the adapter {name!r} is larger than any adapter for this model can be.",
            "Check that the file is an adapter and not a model.",
            or_engine="raise max_lora_rank",
        )
    return body


def _config(name: str, said: bytes) -> dict[str, Any]:
    try:
        config = json.loads(said)
    except (ValueError, RecursionError) as error:
        raise LoRAError(f"{CONFIG} of the adapter {name!r} is not JSON.", "Save the adapter again.") from error
    if not isinstance(config, dict):
        raise LoRAError(f"{CONFIG} of the adapter {name!r} is not an object.", "Save the adapter again.")
    if config.get("peft_type") != "LORA":
        raise LoRAError(
            f"{CONFIG} of the adapter {name!r} has the peft_type {_shown(config.get('peft_type'))}.",
            "Only the type LORA is supported.",
            param="peft_type",
        )
    if config.get("bias", "none") != "none":
        reason = f"The adapter {name!r} also changes biases ({CONFIG})."
        raise LoRAError(reason, "Train it with bias='none'.", param="bias")
    start = config.get("init_lora_weights")
    if not any(start is plain or (isinstance(start, str) and start == plain) for plain in _PLAIN_STARTS):
        raise LoRAError(
            f"{CONFIG} of the adapter {name!r} has init_lora_weights={_shown(start)}, which also changes the base "
            "weights.",
            "Convert it to a plain LoRA adapter first (see peft's notes on this initialisation).",
            param="init_lora_weights",
        )
    known = _DESCRIBING | _APPLIED | {"bias", "init_lora_weights"}
    for field, value in config.items():
        if value and field not in known:
            place = f"{CONFIG} of the adapter {name!r}"
            raise LoRAError(
                f"{place} sets use_dora, and beheld does not yet support DoRA."
                if field == "use_dora"
                else f"Unsupported {field[:_SHOWN]} in {place}.",
                "Train it without that.",
                param=field[:_SHOWN],
            )
    return config


def _scales(name: str, config: Mapping[str, Any], max_rank: int) -> _Scales:
    rank, alpha = config.get("r", 8), config.get("lora_alpha", 8)
    patterns = [config.get(field) or {} for field in ("rank_pattern", "alpha_pattern")]
    if not _is_rank(rank) or not _is_number(alpha) or not all(isinstance(pattern, dict) for pattern in patterns):
        raise LoRAError(f"{CONFIG} of the adapter {name!r} has no usable r and lora_alpha.", "Save the adapter again.")
    if rank > max_rank and not patterns[0]:
        raise _too_wide(name, rank, max_rank)
    until = time.thread_time() + PATTERNS_S
    return _Scales(rank, alpha, patterns[0], patterns[1], config.get("use_rslora"), until)


def _scale_of(name: str, scales: _Scales, path: str) -> tuple[int, float]:
    try:
        rank, scale = scales.of(path)
    except TimeoutError as error:
        raise LoRAError(
            f"The rank_pattern or alpha_pattern in {CONFIG} of the adapter {name!r} takes more than {PATTERNS_S:g} s "
            "to match.",
            "Name the layers in full there.",
            param="rank_pattern",
        ) from error
    except (regex.error, TypeError, ValueError, ZeroDivisionError, OverflowError, RecursionError) as error:
        raise LoRAError(
            f"{CONFIG} of the adapter {name!r} has an unusable pattern of ranks or scales.",
            "Correct rank_pattern and alpha_pattern, or save the adapter again.",
            param="rank_pattern",
        ) from error
    if not _is_rank(rank) or not _is_number(scale):
        raise LoRAError(
            f"{CONFIG} of the adapter {name!r} has no usable rank or scale for {_shown(path)}.",
            "Correct r, lora_alpha, rank_pattern and alpha_pattern, or save the adapter again.",
            param="rank_pattern",
        )
    return rank, scale


def _matching(pattern: Mapping[str, Any], path: str, default: Any, until: float) -> Any:
    """Return the first entry whose key matches the end of the path, as peft does."""
    for key, value in pattern.items():
        left = until - time.thread_time()
        if left <= 0:
            raise TimeoutError
        if regex.match(rf"(.*\.)?({key})$", path, timeout=left):
            return value
    return default


def _tensors(name: str, body: bytes, max_header: int) -> dict[str, Tensor]:
    if int.from_bytes(body[:8], "little") > min(max_header, len(body)):
        raise LoRAError(
            f"{WEIGHTS} of the adapter {name!r} is broken: its header is longer than the file, or than that of any "
            "adapter for this model.",
            "Fetch it again.",
        )
    from safetensors import SafetensorError
    from safetensors.torch import load as read

    try:
        return read(body)
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise LoRAError(
            f"{WEIGHTS} of the adapter {name!r} is broken: {str(error)[:_SHOWN]}.", "Fetch it again."
        ) from error


def _pairs(name: str, tensors: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the two matrices of each layer path."""
    halves: dict[str, dict[str, Tensor]] = {}
    owners: set[str | None] = set()
    for key, tensor in tensors.items():
        found = _KEY.fullmatch(key)
        if found is None:
            raise LoRAError(
                f"{WEIGHTS} of the adapter {name!r} holds {_shown(key)}, which is not a LoRA matrix of a linear layer.",
                "Adapters of embeddings, heads and whole modules are not supported: leave them out, or merge it.",
            )
        owners.add(found["own"])
        halves.setdefault(found["path"], {})[found["which"]] = tensor
    if not halves or len(owners) > 1:
        what = "nothing" if not halves else "several adapters"
        raise LoRAError(f"{WEIGHTS} of the adapter {name!r} holds {what}.", "Save one adapter to one folder.")
    single = next((path for path, both in halves.items() if len(both) != 2), None)
    if single is not None:
        reason = f"{WEIGHTS} of the adapter {name!r} has only one of the two matrices of {_shown(single)}."
        raise LoRAError(reason, "Fetch it again.")
    return {path: (both["A"], both["B"]) for path, both in halves.items()}


def _check_shapes(
    name: str, site: Site, down_rI: Tensor, up_Or: Tensor, rank: int, max_rank: int, config: Mapping[str, Any]
) -> None:
    if down_rI.dim() != 2 or up_Or.dim() != 2 or down_rI.shape[0] != up_Or.shape[1]:
        raise LoRAError(
            f"The matrices of {site.name!r} in {WEIGHTS} of the adapter {name!r} do not fit each other: "
            f"{tuple(down_rI.shape)} and {tuple(up_Or.shape)}.",
            "Fetch or save it again.",
        )
    if (down_rI.shape[1], up_Or.shape[0]) != (site.num_inputs, site.num_outputs):
        raise LoRAError(
            f"{WEIGHTS} of the adapter {name!r} was made for another model: {site.name!r} has {site.num_inputs} inputs "
            f"and {site.num_outputs} outputs, its matrices are for {down_rI.shape[1]} and {up_Or.shape[0]}.",
            f"It was made for {_base(config)}.",
        )
    if down_rI.shape[0] != rank:
        raise LoRAError(
            f"{CONFIG} of the adapter {name!r} gives rank {rank} for {site.name!r}, but its matrices have rank "
            f"{down_rI.shape[0]} in {WEIGHTS}.",
            "Correct r or rank_pattern, or save the adapter again.",
            param="r",
        )
    if rank > max_rank:
        raise _too_wide(name, rank, max_rank)


def _ready(
    name: str, path: str, down_rI: Tensor, up_Or: Tensor, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    if down_rI.dtype not in _DTYPES or up_Or.dtype not in _DTYPES:
        raise LoRAError(
            f"The matrices of {_shown(path)} in {WEIGHTS} of the adapter {name!r} have unsupported types: "
            f"{down_rI.dtype}, {up_Or.dtype}.",
            "Save it in float32, bfloat16 or float16.",
        )
    down, up = down_rI.to(dtype), (up_Or.float() * scale).to(dtype)
    if not (down.isfinite().all() and up.isfinite().all()):
        raise LoRAError(
            f"The matrices of {_shown(path)} in {WEIGHTS} of the adapter {name!r} are not finite (NaN or infinite) in "
            f"{str(dtype).removeprefix('torch.')}.",
            "Fetch or train it again.",
        )
    return down.contiguous(), up.contiguous()


def _check_targets(name: str, config: Mapping[str, Any], form: Form, found: Mapping[str, Any]) -> None:
    """Refuse a file that lacks the matrices of a layer that the configuration names and the model has.

    Raises:
        LoRAError: it does.
    """
    targets = config.get("target_modules")
    # Every end of a site's path at a dot, and whether a site of that end has matrices.
    ends: dict[str, bool] = {}
    for site in form.sites:
        parts = site.split(".")
        for start in range(len(parts)):
            end = ".".join(parts[start:])
            ends[end] = ends.get(end, False) or site in found
    for target in targets if isinstance(targets, list) else ():
        if isinstance(target, str) and ends.get(target) is False:
            raise LoRAError(
                f"{CONFIG} of the adapter {name!r} lists {target!r} in its target_modules, but {WEIGHTS} holds no "
                "matrices for it.",
                "Fetch it again.",
                param="target_modules",
            )


def _too_wide(name: str, rank: int, max_rank: int) -> LoRAError:
    return LoRAError(
        f"The rank {_shown(rank)} of the adapter {name!r} ({CONFIG}) is greater than max_lora_rank, {max_rank}.",
        param="max_lora_rank",
        or_engine=f"start the engine with max_lora_rank={_shown(rank)}",
    )


def _base(config: Mapping[str, Any]) -> str:
    base = config.get("base_model_name_or_path")
    return repr(base[:128]) if isinstance(base, str) and base else "another model"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _is_rank(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


__all__ = ["Form", "LoRAWeights", "Site", "load"]
