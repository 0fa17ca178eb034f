"""Writes a checkpoint with the linear layers of its text model rounded, one weight after the other.

Embeddings, the head, routers, towers and projectors stay as they are. Files and names are those of the source.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from beheld.checkpoint.files import CONFIG, read_json, read_json_list
from beheld.checkpoint.pooling import MODULES
from beheld.checkpoint.quantized import stated
from beheld.core.config import ModelInfo
from beheld.core.errors import ModelError, UserError
from beheld.models.load import model_class_of
from beheld.models.surgery.parts import text_part
from beheld.quant.at_load import FEWEST_OUTPUTS
from beheld.quant.row_bytes import sources_of
from beheld.quant.stored_entries import StoredEntries, entry_files
from beheld.quant.written import WrittenForm, int4_form, int8_form
from beheld.quant.written_awq import AWQForm, awq_form

# What becomes of an entry before it is rounded.
Change = Callable[[Tensor], Tensor]
Form = WrittenForm | AWQForm
# Method -> the form for layers with these numbers of inputs.
FORMS: dict[str, Callable[[list[int]], Form]] = {
    "int8": int8_form,
    "int4": int4_form,
    "gptq": int4_form,
    "awq": awq_form,
}
# Forms that need second moments of layers' inputs, and forms that scale inputs by their size.
CALIBRATED, SCALED = ("gptq",), ("awq",)
_TEMPLATES = "additional_chat_templates"
_WEIGHTS = (".safetensors", ".bin", ".pth", ".gguf")


@dataclass(frozen=True)
class RoundingChoice:
    """What becomes of a checkpoint's entries.

    Attributes:
        form: of rounded weights.
        rounded: entry -> the linear layer of the model that it is the weight of; None if it is one expert's.
        ignored: names of linear layers that stay as they are, in the files and in the model.
        sources: a parameter of the model -> the entry that it is, if it is one alone.
        dtypes: of entries that are norms' or biases'.
    """

    form: Form
    rounded: Mapping[str, str | None]
    ignored: tuple[str, ...]
    sources: Mapping[str, str]
    dtypes: Mapping[str, torch.dtype]


def choose(info: ModelInfo, hf_config: Any, method: str) -> RoundingChoice:
    """Choose what is rounded.

    Raises:
        ModelError, UserError: the checkpoint is quantized already, or nothing of it can be rounded.
    """
    path = Path(info.path)
    if stated(read_json(path / CONFIG)) is not None or info.secondary:
        raise UserError(f"The weights of {info.name!r} are quantized, or lie in several checkpoints.", "Name another.")
    entries = StoredEntries(path)
    with torch.device("meta"):
        model = model_class_of(info, hf_config)._from_config(hf_config)
    names_by_target, joined = sources_of(model, dict(entries.slices))
    text, head = text_part(model), model.get_output_embeddings()
    inside = {id(module) for module in text.modules()} - {id(head)}
    routers = {
        id(part)
        for module in text.modules()
        if any("experts" in name for name, _ in module.named_children())
        for name, child in module.named_children()
        if name in ("gate", "router")
        # Some hold the layer that decides, in place of being it.
        for part in child.modules()
    }
    linears: dict[str, str | None] = {}
    kept: set[str] = set()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            sources = names_by_target.get(f"{name}.weight", [])
            fits = id(module) in inside and id(module) not in routers and module.out_features >= FEWEST_OUTPUTS
            if fits and len(sources) == 1 and joined[f"{name}.weight"] is None:
                linears[sources[0]] = name
            else:
                kept |= {name, *(source.removesuffix(".weight") for source in sources)}
        elif id(module) in inside:
            # Experts that the files hold one by one, and the model stacked.
            for own, parameter in module.named_parameters(recurse=False):
                sources = names_by_target.get(f"{name}.{own}", [])
                if parameter.dim() == 3 and all(len(entries.shape(each)) == 2 for each in sources):
                    linears |= dict.fromkeys((each for each in sources if each.endswith(".weight")), None)
    form = FORMS[method]([entries.shape(name)[1] for name in linears])
    rounded = {name: module for name, module in linears.items() if form.fits(*entries.shape(name))}
    for name in linears.keys() - rounded.keys():
        kept |= {name.removesuffix(".weight"), linears[name] or name.removesuffix(".weight")}
    if not rounded:
        raise ModelError(f"None of the linear layers of {info.name!r} can be rounded by {method}.")
    alone = {name: own[0] for name, own in names_by_target.items() if len(own) == 1 and joined[name] is None}
    dtypes = {name: entries.slices[name][...].dtype for name in alone.values() if len(entries.shape(name)) == 1}
    return RoundingChoice(form, rounded, tuple(sorted(kept)), alone, dtypes)


def write(
    info: ModelInfo,
    chosen: RoundingChoice,
    out: Path,
    moments: Callable[[str], Tensor | None],
    changes: Mapping[str, Change] | None = None,
) -> tuple[int, int]:
    """Write the checkpoint to a new folder; returns the bytes of the weights before and after.

    Args:
        moments: returns the second moments of the inputs of a layer, by its name in the model; None if there are none.
        changes: entry -> what becomes of it before it is rounded, or written as it is.

    Raises:
        UserError: the folder is there already, or cannot be written.
    """
    check(out)
    with written_to(out):
        out.mkdir(parents=True)
        try:
            _copy_others(Path(info.path), out)
            return _write_weights(Path(info.path), chosen, out, moments, changes or {})
        except BaseException:
            # A part of a checkpoint is of no use, and would stand in the way of the next try.
            shutil.rmtree(out, ignore_errors=True)
            raise


def check(out: Path) -> None:
    """Refuse a folder that is there already.

    Raises:
        UserError: as above.
    """
    if out.exists():
        raise UserError(f"{str(out)!r} exists already.", "Name a new folder.")


@contextmanager
def written_to(out: Path) -> Iterator[None]:
    """Tell the user of a full disk, or a place that cannot be written.

    Raises:
        UserError: as above.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        why = error.strerror if isinstance(error, OSError) else None
        raise UserError(
            f"{str(out)!r} cannot be written.", "Free the disk, or name another place.", detail=why or str(error)
        ) from error


def _copy_others(source: Path, out: Path) -> None:
    """Copy what is no weight of the model, and the folders that the checkpoint speaks of; config.json comes last."""
    for file in source.iterdir():
        other = file.suffix not in _WEIGHTS and not file.name.endswith(".index.json") and file.name != CONFIG
        if file.is_file() and other:
            shutil.copy(file, out / file.name)
    named = [str(each.get("path") or "") for each in read_json_list(source / MODULES)]
    for name in (_TEMPLATES, *named):
        if name and (source / name).is_dir():
            shutil.copytree(source / name, out / name, dirs_exist_ok=True)


def _write_weights(
    source: Path,
    chosen: RoundingChoice,
    out: Path,
    moments: Callable[[str], Tensor | None],
    changes: Mapping[str, Change],
) -> tuple[int, int]:
    """Write the weights and config.json; see `write`."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    by_file: dict[str, str] = {}
    before = after = 0
    for file in entry_files(source):
        made: dict[str, Tensor] = {}
        with safe_open(file, framework="pt", device="cpu") as opened:
            for name in opened.keys():  # noqa: SIM118 (it is no mapping)
                tensor = opened.get_tensor(name)
                before += tensor.nbytes
                tensor = changes[name](tensor) if name in changes else tensor
                if name not in chosen.rounded:
                    made[name] = tensor
                    continue
                layer = chosen.rounded[name]
                found = chosen.form.entries(tensor, None if layer is None else moments(layer))
                module = name.removesuffix("weight")
                made |= {module + end: value.contiguous() for end, value in found.items()}
        after += sum(tensor.nbytes for tensor in made.values())
        by_file |= dict.fromkeys(made, file.name)
        save_file(made, out / file.name, metadata={"format": "pt"})
    if len(set(by_file.values())) > 1:
        index = {"metadata": {"total_size": after}, "weight_map": by_file}
        (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")
    config = read_json(source / CONFIG) | {"quantization_config": chosen.form.config(chosen.ignored)}
    (out / CONFIG).write_text(json.dumps(config, indent=1), encoding="utf-8")
    return before, after
