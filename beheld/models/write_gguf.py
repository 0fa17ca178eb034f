"""Writes a checkpoint's text model as one GGUF file, which llama.cpp, programs built on it and beheld read.

The header is written first and read back by our own reader; a checkpoint with something that the file cannot state is
refused before any weight is read. Weights follow one after the other, a few rows at a time.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from beheld.checkpoint.files import CONFIG, read_json
from beheld.checkpoint.gguf.config import config_of, generation_config_of
from beheld.checkpoint.gguf.entries import content_of, layout_of, text_entries, unsaid, written_types
from beheld.checkpoint.gguf.header import SUFFIX, Header, read_header
from beheld.checkpoint.gguf.names import ROPE_FACTORS, StoredName, stored_name
from beheld.checkpoint.gguf.tokenizer import tokenizer_files
from beheld.checkpoint.gguf.vocabulary import differences, tokenizer_entries
from beheld.checkpoint.quantized import stated
from beheld.core.config import ModelInfo
from beheld.core.errors import ModelError, UserError
from beheld.families.family import Family, GGUFLayout
from beheld.models.load import model_class_of
from beheld.models.write_quantized import written_to
from beheld.quant.gguf import heads_of, source_rows
from beheld.quant.grouped import check_greatest
from beheld.quant.row_bytes import sources_of
from beheld.quant.stored_entries import StoredEntries
from beheld.utils.log import get_logger

logger = get_logger(__name__)

# Types of weights -> how the files number a whole file of them.
TYPES = {"f32": 0, "f16": 1, "bf16": 32, "q8_0": 7, "q4_0": 2, "q4_1": 3, "q5_0": 8, "q5_1": 9}
_ROUNDED_FURTHER = ("q4_0", "q4_1", "q5_0", "q5_1")
# The type of embeddings and head where others have fewer bits.
_FINER = "q8_0"
_ENDS_OF_MODEL = ("token_embd.weight", "output.weight")
# Routers decide more than they compute.
_ROUTERS = ("ffn_gate_inp", "ffn_gate_inp_shexp")
_DTYPES = {"F32": 4, "F16": 2, "BF16": 2}
_CONVERT = "Convert the checkpoint with llama.cpp's convert_hf_to_gguf.py."
# Scales of blocks are float16.
_MOST = 65504.0
# Numbers that are written at a time: they take several times their memory on the way.
_CHUNK = 1 << 21


@dataclass(frozen=True)
class _FileTensor:
    """A tensor of the file.

    Attributes:
        name: the file's.
        shape: as torch says it.
        type_name: its type, of TYPES.
        sources: the checkpoint's entries, one for each expert or one alone.
        heads: the number of heads whose rows change their order; None if they keep it.
        plus: what is added to the numbers.
    """

    name: str
    shape: tuple[int, ...]
    type_name: str
    sources: tuple[str, ...] = ()
    heads: int | None = None
    plus: float = 0.0

    @property
    def num_bytes(self) -> int:
        """The bytes in the file."""
        from gguf import GGML_QUANT_SIZES

        block, block_bytes = GGML_QUANT_SIZES[_number(self.type_name)]
        return math.prod(self.shape) // block * int(block_bytes)


@dataclass(frozen=True)
class WrittenFile:
    """What was written.

    Attributes:
        rounded: the number of the checkpoint's weights that the file has in another type of fewer bits.
        bytes_before, bytes_after: of all weights.
    """

    rounded: int
    bytes_before: int
    bytes_after: int


def write(info: ModelInfo, hf_config: Any, load_tokenizer: Callable[[], Any], kind: str, out: Path) -> WrittenFile:
    """Write the checkpoint as one GGUF file, of which nothing stays if that fails.

    Args:
        info, hf_config: the checkpoint's.
        load_tokenizer: returns its tokenizer, transformers'.
        kind: the type of matrices, of TYPES.
        out: the file.

    Raises:
        ModelError, UserError: see `check`; or the file would not say all of the checkpoint, or cannot be written.
    """
    family, layout = check(info, kind, out)
    said, tokenizer = text_entries(content_of(hf_config), family, layout), load_tokenizer()
    entries = StoredEntries(Path(info.path))
    tensors = _file_tensors(info, hf_config, layout, entries, kind)
    metadata = {
        "general.type": "model",
        "general.name": Path(info.name).name,
        "general.file_type": TYPES[kind],
        "general.quantization_version": 2,
        **{f"{layout.architecture}.{name}": value for name, value in said.entries.items()},
        **tokenizer_entries(tokenizer, _rows(tensors), info.eos_ids),
    }
    if said.divisors is not None:
        tensors = [_FileTensor(ROPE_FACTORS, (len(said.divisors),), "f32"), *tensors]
    draft = out.with_name(f".{out.name}.part")
    with written_to(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        with _removed_unless_renamed(draft):
            with _opened(draft, layout.architecture, metadata, tensors) as file:
                header = read_header(draft)
                if said.divisors is not None:
                    _put(file, header, ROPE_FACTORS, [np.array(said.divisors, np.float32)])
                _check_read_back(header, draft, hf_config, tokenizer, info)
                for tensor in tensors:
                    if tensor.sources:
                        _put(file, header, tensor.name, _parts(tensor, entries))
            os.rename(draft, out)
    sources = [(name, tensor.type_name) for tensor in tensors for name in tensor.sources]
    kinds = {name: entries.slices[name].get_dtype() for name, _ in sources}
    return WrittenFile(
        rounded=sum(own not in ("f32", kinds[name].lower()) for name, own in sources),
        bytes_before=sum(math.prod(entries.shape(name)) * _DTYPES[kinds[name]] for name, _ in sources),
        bytes_after=sum(tensor.num_bytes for tensor in tensors),
    )


@contextmanager
def _removed_unless_renamed(draft: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def check(info: ModelInfo, kind: str, out: Path) -> tuple[Family, GGUFLayout]:
    """Return how the model is written.

    Raises:
        ModelError, UserError: what is seen without weights: the file is there already, its name or type is none of
            GGUF's, the checkpoint is quantized or of a model type that is not written, or the package gguf is missing.
    """
    if kind not in TYPES:
        raise UserError(
            f"The type {kind!r} is not written; known are {', '.join(TYPES)}.",
            "Write bf16, and let llama.cpp's llama-quantize make the types with K and IQ of it.",
        )
    if find_spec("gguf") is None:
        raise ModelError("GGUF files need the package gguf, which is not installed.", "Install it: pip install gguf")
    if out.suffix.lower() != SUFFIX:
        raise UserError(f"{str(out)!r} is no name of a GGUF file.", f"Name a file that ends with {SUFFIX}.")
    if out.exists():
        raise UserError(f"{str(out)!r} exists already.", "Name a new file.")
    said = read_json(Path(info.path) / CONFIG)
    if stated(said) is not None or info.secondary:
        raise UserError(f"The weights of {info.name!r} are quantized, or lie in several checkpoints.", "Name another.")
    known = layout_of(str(said.get("model_type")))
    if known is None:
        raise ModelError(
            f"Models of the type {said.get('model_type')!r} are not written into GGUF files; known are "
            f"{', '.join(written_types())}.",
            _CONVERT,
        )
    return known


def _file_tensors(
    info: ModelInfo, hf_config: Any, layout: GGUFLayout, entries: StoredEntries, kind: str
) -> list[_FileTensor]:
    """Return the file's tensors.

    Raises:
        ModelError: weights are missing, or of a kind that files have no name for.
    """
    with torch.device("meta"):
        model = model_class_of(info, hf_config)._from_config(hf_config)
    known = model.state_dict()
    names_by_target, joined = sources_of(model, dict(entries.slices))
    tied = bool(getattr(hf_config, "tie_word_embeddings", False))
    spare = {"lm_head.weight"} if tied else set[str]()
    missing = sorted(known.keys() - names_by_target.keys() - spare)
    if missing:
        raise ModelError(
            f"The checkpoint has no weights for {missing[0]!r} ({len(missing)} are missing).", "Fetch it again."
        )
    found: dict[str, dict[int | None, str]] = {}
    theirs_by_name: dict[str, str] = {}
    for target, sources in names_by_target.items():
        # The loader leaves out what the class does not have.
        if target not in known or target in spare:
            continue
        for source in sources:
            theirs = source if joined[target] is not None else target
            stored = stored_name(theirs, layout.parts)
            if stored is None:
                raise ModelError(f"GGUF files of {layout.architecture} models have no name for {theirs!r}.", _CONVERT)
            found.setdefault(stored.name, {})[stored.expert] = source
            theirs_by_name[stored.name] = theirs
    said = content_of(hf_config)
    return [
        _tensor(StoredName(name), theirs_by_name[name], parts, layout, entries, kind, said)
        for name, parts in found.items()
    ]


def _tensor(
    stored: StoredName,
    theirs: str,
    parts: Mapping[int | None, str],
    layout: GGUFLayout,
    entries: StoredEntries,
    kind: str,
    said: Mapping[str, Any],
) -> _FileTensor:
    sources = tuple(parts[index] for index in sorted(parts, key=lambda index: -1 if index is None else index))
    for source in sources:
        entries.require(source, tuple(_DTYPES), entries.shape(sources[0]))
    shape = tuple(entries.shape(sources[0]))
    if None not in parts:
        shape = (len(sources), *shape)
    plus = 1.0 if layout.norms_plus_one and theirs.endswith("norm.weight") else 0.0
    own = _kind(stored.name, shape, kind, entries.slices[sources[0]].get_dtype())
    return _FileTensor(stored.name, shape, own, sources, heads_of(stored.name, layout, said), plus)


def _kind(name: str, shape: Sequence[int], kind: str, source: str) -> str:
    """Return the type of a tensor of the file, the checkpoint's type being `source`."""
    from gguf import GGML_QUANT_SIZES

    if len(shape) == 1 or name.split(".")[-2] in _ROUTERS:
        return "f32"
    own = _FINER if kind in _ROUNDED_FURTHER and name in _ENDS_OF_MODEL else kind
    if shape[-1] % GGML_QUANT_SIZES[_number(own)][0]:
        return "bf16" if source == "BF16" else "f16"
    return own


def _rows(tensors: Sequence[_FileTensor]) -> int:
    return next(tensor.shape[0] for tensor in tensors if tensor.name == _ENDS_OF_MODEL[0])


def _number(kind: str) -> Any:
    """Return the package's number of a type."""
    from gguf import GGMLQuantizationType

    return GGMLQuantizationType[kind.upper()]


def _opened(draft: Path, architecture: str, metadata: Mapping[str, Any], tensors: Sequence[_FileTensor]) -> IO[bytes]:
    """Write the header, with room for the numbers, and return the open file."""
    from gguf import GGUFWriter

    writer = GGUFWriter(draft, architecture)
    for name, value in metadata.items():
        _add(writer, name, value)
    for tensor in tensors:
        writer.add_tensor_info(
            tensor.name, tensor.shape, np.dtype(np.float32), tensor.num_bytes, raw_dtype=_number(tensor.type_name)
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    assert writer.fout is not None
    (file,) = writer.fout
    writer.write_padding(file, file.tell())
    room = sum(GGUFWriter.ggml_pad(tensor.num_bytes, writer.data_alignment) for tensor in tensors)
    file.truncate(file.tell() + room)
    file.flush()
    return file


def _add(writer: Any, name: str, value: Any) -> None:
    kinds: tuple[tuple[type, Callable[[str, Any], None]], ...] = (
        (bool, writer.add_bool),
        (int, writer.add_uint32),
        (float, writer.add_float32),
        (str, writer.add_string),
    )
    next((add for kind, add in kinds if isinstance(value, kind)), writer.add_array)(name, value)


def _check_read_back(header: Header, draft: Path, hf_config: Any, tokenizer: Any, info: ModelInfo) -> None:
    """Refuse what the file does not say of the checkpoint.

    Raises:
        ModelError: as above; it names the first entry or text.
    """
    from transformers import AutoConfig

    content = config_of(header, draft)
    kept = {
        name: value for name, value in content.items() if name not in ("quantization_config", "transformers_weights")
    }
    back = AutoConfig.for_model(kept.pop("model_type"), **kept)
    lost = unsaid(hf_config, back)
    if lost:
        words = "; ".join(
            f"{name} is {meant!r}, and would be read as {found!r}" for name, (meant, found) in lost.items()
        )
        raise ModelError(
            f"A GGUF file does not say all of {info.name!r}: {words}.",
            "Change it with --hf-overrides if your prompts allow it, or use the checkpoint as it is.",
        )
    ends = set(generation_config_of(header).get("eos_token_id") or ())
    if not info.eos_ids <= ends:
        raise ModelError(
            f"A GGUF file names three tokens that end an answer, and {info.name!r} has {len(info.eos_ids)}.",
            "Leave some out of the eos_token_id in its generation_config.json.",
        )
    edges = []
    for each in differences(tokenizer, tokenizer_files(header, draft)["tokenizer.json"]):
        if not each.edge:
            raise ModelError(
                f"A GGUF file does not say all of the tokenizer of {info.name!r}: {each}.",
                _CONVERT,
            )
        edges.append(each)
    if edges:
        logger.warning(
            "Spaces at the beginning of a text or next to tokens that are read whole count otherwise in the file: %s. "
            "With --tokenizer %s beheld reads text as the checkpoint does.",
            min(edges, key=lambda each: (not each.text.strip(), len(each.text))),
            info.name,
        )


def _put(file: IO[bytes], header: Header, name: str, parts: Iterator[np.ndarray] | Sequence[np.ndarray]) -> None:
    """Write a tensor's numbers to its place."""
    stored, written = header.tensors[name], 0
    file.seek(stored.start)
    for part in parts:
        written += file.write(np.ascontiguousarray(part).view(np.uint8).data)
    assert written == stored.num_bytes, f"{name}: {written} bytes of {stored.num_bytes}"
    file.flush()


def _parts(tensor: _FileTensor, entries: StoredEntries) -> Iterator[np.ndarray]:
    """Yield a tensor's numbers in its type, a few rows at a time.

    Raises:
        ModelError: numbers are NaN or infinity, or greater than the type holds.
    """
    from gguf.quants import quantize

    for source in tensor.sources:
        stored = entries.slices[source]
        shape = entries.shape(source)
        inputs = shape[-1] if len(shape) > 1 else 1
        rows = max(1, _CHUNK // inputs)
        whole = None if tensor.heads is None else stored[...][torch.from_numpy(_file_rows(shape[0], tensor.heads))]
        for start in range(0, shape[0], rows):
            part: Tensor = (stored if whole is None else whole)[start : start + rows].float() + tensor.plus
            greatest = part.abs().amax()
            check_greatest(greatest)
            if tensor.type_name not in ("f32", "bf16") and float(greatest) > _MOST:
                raise ModelError(
                    f"{source!r} holds {float(greatest):g}, and {tensor.type_name} no more than {_MOST:g}.",
                    "Write bf16.",
                )
            yield quantize(part.numpy(), _number(tensor.type_name))


def _file_rows(outputs: int, heads: int) -> np.ndarray:
    """Return transformers' row for each row of the file; see source_rows."""
    return source_rows(outputs, heads).argsort()
