"""Validates embeddings given in place of images, videos or audio, and makes items of them without processing."""

from __future__ import annotations

import base64
import binascii
import io
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from beheld.core.config import MediaLimits, ModelInfo
from beheld.core.errors import DecodeError, LimitError
from beheld.core.media import MediaItem
from beheld.inputs.media import digest
from beheld.inputs.media.decode import is_array, is_tensor

# The limit of a safetensors header; one tensor's takes about a hundred bytes.
# Bytes in float32 of a view that repeats numbers: one of some bytes would take as much memory as the largest item.
_MAX_REPEATED = 1 << 20
_MAX_HEADER_BYTES = 1 << 16
_FEWER = "Give fewer or shorter items."
# The largest number of items whose grids one mapping may hold.
_MAX_GRIDS = 4096
_NUMBERS = {2: "two", 3: "three"}
# Modality -> the tensor of sizes in pixels: of each image, or of each frame of each video.
SIZES = {"image": "image_sizes", "video": "video_image_sizes"}


@dataclass(frozen=True, eq=False)
class Embeddings:
    """Embeddings of one item.

    Attributes:
        tensor: of the shape (tokens, hidden).
        layout: the numbers that positions need, if any.
        sizes: width and height in pixels of the embedded image or of each frame of the video, if given.
    """

    tensor: Any
    layout: Mapping[str, tuple[Any, ...]]
    sizes: tuple[tuple[int, int], ...] | None = None


def given(value: Any) -> bool:
    """Return whether a user's value for a modality is embeddings rather than media to decode."""
    if isinstance(value, Embeddings | Mapping):
        return True
    if is_tensor(value):
        return not (value.ndim == 4 and str(value.dtype) == "torch.uint8")
    return is_array(value) and value.dtype.kind == "f" and value.ndim in (2, 3) and value.shape[-1] > 4


def split(value: Any, modality: str, info: ModelInfo, merge_size: int) -> list[Embeddings]:
    """Return one Embeddings per item.

    Args:
        value: a tensor (items, tokens, hidden) or (tokens, hidden), or a mapping with the tensor under
            "<modality>_embeds" and, for families with multi-axis positions, "<modality>_grid_thw" (items, 3); or
            "image_embeds" and "image_sizes" (items, 2), width and height, where a prompt says how an image is cut;
            then also "video_embeds" and "video_image_sizes" (items, frames, 2). "audio_embeds" may be a list.
        modality: "image", "video" or "audio".
        info: the model.
        merge_size: patches per embedding along each side, for families with a grid.

    Raises:
        DecodeError: wrong shape, type, width, number, or values that are not finite; a missing or unknown tensor.
    """
    if isinstance(value, Embeddings):
        return [value]
    if info.position_axes > 1 and "audio" in info.modalities and modality != "image":
        # Their positions need lengths and times, which embeddings lack.
        raise DecodeError(f"This model does not accept embeddings of {modality}.", f"Send the {modality} itself.")
    if isinstance(value, Mapping):
        return _split_mapping(value, modality, info, merge_size)
    if info.position_axes > 1:
        raise DecodeError(
            f"Embeddings for this model need the grid of each {modality}.",
            f'Give {{"{modality}_embeds": tensor, "{modality}_grid_thw": tensor of (items, 3)}}.',
        )
    tensor = _tensor(value)
    if tensor.ndim == 2:
        tensor = tensor[None]
    if tensor.ndim != 3:
        raise DecodeError(
            f"Embeddings must have the shape (items, tokens, {info.hidden_size}), not {tuple(tensor.shape)}.",
            "Give images as PIL images or as arrays of bytes (height, width, 3).",
        )
    return [Embeddings(check(entry, info, modality), {}) for entry in tensor]


def _split_mapping(value: Mapping[str, Any], modality: str, info: ModelInfo, merge_size: int) -> list[Embeddings]:
    name, grid_name = f"{modality}_embeds", f"{modality}_grid_thw"
    known = {name, grid_name} | ({"second_per_grid_ts"} if modality == "video" else set())
    sizes_name = SIZES.get(modality, "") if info.position_axes == 1 else ""
    known |= {sizes_name} - {""}
    for key in value:
        if key not in known:
            raise DecodeError(
                f"Unknown tensor {str(key)[:64]!r} among the embeddings.", f"Known: {', '.join(sorted(known))}."
            )
    if name not in value:
        raise DecodeError(f"The embeddings lack the tensor {name!r}.", f'Give {{"{name}": tensor}}.')
    if sizes_name in value:
        return _sized(value[name], value[sizes_name], sizes_name, info)
    if grid_name not in value:
        if info.position_axes > 1:
            raise DecodeError(f"The embeddings lack the tensor {grid_name!r}.", "Its shape is (items, 3).")
        if modality == "audio":
            return _windows(value[name], info)
        return split(value[name], modality, info, merge_size)
    tensor = _tensor(value[name])
    grids = _rows(value[grid_name], grid_name, 3)
    flat = tensor.reshape(-1, tensor.shape[-1]) if tensor.ndim in (2, 3) else tensor
    for grid in grids:
        if grid[1] % merge_size or grid[2] % merge_size:
            raise DecodeError(
                f"{grid_name} holds {list(grid)}, whose height or width is no multiple of {merge_size}.",
                f"The model merges {merge_size} x {merge_size} patches into one embedding.",
            )
    counts = [t * h * w // merge_size**2 for t, h, w in grids]
    if flat.ndim != 2 or sum(counts) != flat.shape[0]:
        raise DecodeError(
            f"{grid_name} {[list(g) for g in grids[:8]]} requires {sum(counts)} embeddings; {name} has the shape "
            f"{tuple(tensor.shape)}.",
            f"The product of a grid, divided by {merge_size**2}, is its number of embeddings.",
        )
    seconds = _seconds(value.get("second_per_grid_ts"), len(grids))
    items, start = [], 0
    for grid, count, second in zip(grids, counts, seconds, strict=True):
        layout: dict[str, tuple[Any, ...]] = {grid_name: grid}
        if second is not None:
            layout["second_per_grid_ts"] = (second,)
        items.append(Embeddings(check(flat[start : start + count], info, modality), layout))
        start += count
    return items


def _sized(value: Any, sizes: Any, name: str, info: ModelInfo) -> list[Embeddings]:
    """Return one Embeddings per item; `value` may also be a list of tensors (tokens, hidden)."""
    known = [(size,) for size in _rows(sizes, name, 2)] if name == SIZES["image"] else _frames(sizes, name)
    entries: Any = value
    if not isinstance(value, list | tuple):
        tensor = _tensor(value)
        entries = tensor[None] if tensor.ndim == 2 else tensor
    if len(entries) != len(known):
        kind = "images" if name == SIZES["image"] else "videos"
        raise DecodeError(f"{name} has {len(known)} rows for {len(entries)} {kind}.", "Give one row for each.")
    return [
        Embeddings(check(entry, info, "image" if name == SIZES["image"] else "video"), {}, own)
        for entry, own in zip(entries, known, strict=True)
    ]


def _frames(sizes: Any, name: str) -> list[tuple[tuple[int, int], ...]]:
    """Return the sizes of each video's frames, given as (videos, frames, 2), or as (frames, 2) of one video."""
    if not (is_tensor(sizes) or is_array(sizes) or isinstance(sizes, list | tuple)) or not len(sizes):
        raise DecodeError(f"{name} must have the shape (items, frames, 2).")
    if len(sizes) > _MAX_GRIDS:
        raise DecodeError(f"{name} holds more than {_MAX_GRIDS} rows.", "Give fewer items.")
    first = sizes[0].tolist() if hasattr(sizes[0], "tolist") else sizes[0]
    is_one = isinstance(first, list | tuple) and all(isinstance(length, int) for length in first)
    return [tuple(_rows(own, name, 2)) for own in ([sizes] if is_one else sizes)]


def _windows(value: Any, info: ModelInfo) -> list[Embeddings]:
    """Return one Embeddings per audio item; each may be given in windows, (windows, tokens, hidden) or a list."""
    import torch

    whole = value if isinstance(value, list | tuple) else _tensor(value)
    found = []
    for entry in whole if isinstance(whole, list | tuple) or whole.ndim > 2 else [whole]:
        parts = [_tensor(part) for part in entry] if isinstance(entry, list | tuple) else [_tensor(entry)]
        flat = [part.flatten(0, 1) if part.ndim == 3 else part for part in parts]
        alike = len(flat) > 1 and all(part.ndim == 2 and part.shape[1] == flat[0].shape[1] for part in flat)
        if len(flat) != 1 and not alike:
            raise DecodeError("The windows of an audio item must have the shape (tokens, hidden).", _FEWER)
        found.append(Embeddings(check(torch.cat(flat) if alike else flat[0], info, "audio"), {}))
    return found


def _rows(value: Any, name: str, width: int) -> list[Any]:
    if is_tensor(value):
        _dense(value)
    if is_tensor(value) and value.numel() > width * _MAX_GRIDS:
        raise DecodeError(f"{name} holds more than {_MAX_GRIDS} rows.", "Give fewer items.")
    rows = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(rows, list | tuple) and len(rows) == width and all(isinstance(n, int) for n in rows):
        rows = [rows]
    if not isinstance(rows, list | tuple) or not rows:
        raise DecodeError(f"{name} must have the shape (items, {width}).")
    found = []
    for row in rows:
        row = row.tolist() if hasattr(row, "tolist") else row
        whole = isinstance(row, list | tuple) and len(row) == width and all(isinstance(n, int) and n > 0 for n in row)
        if not whole:
            raise DecodeError(f"{name} must hold {_NUMBERS[width]} whole numbers above 0 per item, got {row!r}.")
        found.append(tuple(row))
    return found


def _seconds(value: Any, count: int) -> list[float | None]:
    if value is None:
        return [None] * count
    values = value.tolist() if hasattr(value, "tolist") else list(value)
    if len(values) != count:
        raise DecodeError(f"second_per_grid_ts holds {len(values)} numbers for {count} videos.", "Give one for each.")
    return [float(v) for v in values]


def _tensor(value: Any) -> Any:
    import torch

    try:
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DecodeError(
            f"A {type(value).__name__} does not hold embeddings.", "Give a tensor of floating-point numbers."
        ) from error
    _dense(tensor)
    if not tensor.is_floating_point():
        raise DecodeError(
            f"Embeddings must hold floating-point numbers, not {str(tensor.dtype).removeprefix('torch.')}.",
            "Give images as PIL images or as numpy arrays of bytes (height, width, 3).",
        )
    return tensor.detach()


def _dense(tensor: Any) -> None:
    import torch

    if tensor.is_meta or tensor.is_nested or tensor.is_quantized or tensor.layout != torch.strided:
        raise DecodeError("Embeddings must be a dense tensor with values.")


def check(value: Any, info: ModelInfo, modality: str = "") -> Any:
    """Return a contiguous tensor (tokens, hidden) in float32 on the CPU; images are wider where `info.deeper` says so.

    Raises:
        DecodeError: wrong shape, type or width, no tokens, or values that are not finite.
    """
    import torch

    tensor = _tensor(value)
    deeper = info.deeper if modality == "image" else 0
    width = (1 + deeper) * info.hidden_size
    if tensor.ndim != 2 or tensor.shape[0] < 1 or tensor.shape[1] != width:
        more = f", and as much for each of the {deeper} tower layers whose features enter later ones"
        raise DecodeError(
            f"Embeddings of one item must have the shape (tokens, {width}) with at least one token, not "
            f"{tuple(tensor.shape)}.",
            f"Their width is the hidden size of the language model{more if deeper else ''}.",
        )
    dense = tensor.to("cpu", torch.float32).contiguous()
    if not bool(torch.isfinite(dense).all()):
        raise DecodeError("The embeddings hold values that are not finite (NaN or infinity).", "Replace them first.")
    # A view of the user's memory would change when the user changes it.
    return dense.clone() if dense.data_ptr() == tensor.data_ptr() else dense


def to_item(embeddings: Embeddings, modality: str, placeholder: int) -> MediaItem:
    """Return the item: embeddings are its features, and each takes one placeholder."""
    tensor = embeddings.tensor
    count = tensor.shape[0]
    described = {name: list(v) for name, v in embeddings.layout.items()} | (
        {"sizes": embeddings.sizes} if embeddings.sizes else {}
    )
    content = digest.of_array("embeds", tensor.numpy(), described)
    return MediaItem(
        modality=modality,
        digest=digest.of_item(content, modality, b"embeds", {}, ""),
        features={"embeds": tensor},
        layout=embeddings.layout,
        replacement_ids=(placeholder,) * count,
        embed_mask=None,
        num_embeds=count,
        feature_bytes=tensor.numel() * tensor.element_size(),
    )


# ---------------------------------------------------------------------- embeddings as text, from messages


def from_base64(value: Any, limits: MediaLimits) -> Any:
    """Return a tensor from base64 of `torch.save(tensor)` or of safetensors; mappings of such text give mappings.

    Values that are neither text nor mappings are returned unchanged.

    Raises:
        DecodeError: not base64, neither of the two formats, or content other than one plain tensor.
        LimitError: larger than allowed, according to the headers.
    """
    if isinstance(value, Mapping):
        return {name: from_base64(entry, limits) for name, entry in value.items()}
    if not isinstance(value, str):
        return value
    try:
        data = base64.b64decode(value.encode("ascii"), validate=True)
    except (binascii.Error, UnicodeEncodeError) as error:
        raise DecodeError("The embeddings are not valid base64.", "Send base64 of torch.save(tensor).") from error
    if len(data) > limits.max_item_bytes:
        raise LimitError(f"The embeddings hold more than {limits.max_item_bytes} bytes.", _FEWER)
    tensor = _load_archive(data, limits) if data[:2] == b"PK" else _load_safetensors(data)
    import torch

    # Subclasses (parameters among them) have behaviour of their own.
    if type(tensor) is not torch.Tensor:
        raise DecodeError("The embeddings are not one plain tensor.", "Save one tensor with torch.save.")
    return tensor


def _load_archive(data: bytes, limits: MediaLimits) -> Any:
    import torch

    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entries: Sequence[zipfile.ZipInfo] = archive.infolist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        raise DecodeError("The embeddings are not an archive of torch.save.", "Save them with torch.save.") from error
    # torch never compresses; compressed data could expand to any size.
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise DecodeError("The archive of the embeddings is compressed.", "Save them with torch.save.")
    if sum(entry.file_size for entry in entries) > limits.max_item_bytes:
        raise LimitError(f"The embeddings hold more than {limits.max_item_bytes} bytes.", _FEWER)
    try:
        tensor = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:
        raise DecodeError(
            "The archive of the embeddings cannot be read.", "Save one tensor with torch.save."
        ) from error
    # A view may repeat a few numbers to any size; a nested tensor has no size.
    sized = isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided and not tensor.is_nested
    if sized and tensor.numel() * tensor.element_size() > limits.max_item_bytes:
        raise LimitError(f"The embeddings expand to more than {limits.max_item_bytes} bytes.", _FEWER)
    repeats = sized and tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes()
    if repeats and 4 * tensor.numel() > _MAX_REPEATED:
        raise LimitError(
            f"The embeddings are a view that repeats numbers to more than {_MAX_REPEATED} bytes.",
            "Save tensor.contiguous().",
        )
    return tensor


def _load_safetensors(data: bytes) -> Any:
    """Return the single tensor; the library checks the header's size, and that every offset is within the bytes."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        found = load(data) if int.from_bytes(data[:8], "little") <= _MAX_HEADER_BYTES else {}
    except (SafetensorError, KeyError, ValueError) as error:
        raise DecodeError(
            "The embeddings are neither an archive of torch.save nor safetensors.", "Save one tensor with either."
        ) from error
    if len(found) != 1:
        raise DecodeError("The embeddings are not one tensor.", "Save one tensor with torch.save or safetensors.")
    return next(iter(found.values()))
