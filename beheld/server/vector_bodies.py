"""Vectors as the bare body of an answer, one after another; the header `metadata` says where each one lies."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.responses import JSONResponse, Response

from beheld.api.vector_bytes import to_bytes
from beheld.server.errors import HttpError

FORMATS = ("bytes", "bytes_only")
# A header with a place for each holds some 55,000 bytes; clients read lines of up to 65,536.
_MOST_PLACES = 500


@dataclass(frozen=True)
class VectorBody:
    """Vectors as bytes.

    Attributes:
        places: for the header; None if there is none.
    """

    data: bytes
    places: Mapping[str, Any] | None


def check(encoding: str | None, count: int) -> None:
    """Raise HttpError if the places of so many vectors would not fit into a header."""
    if encoding == "bytes" and count > _MOST_PLACES:
        raise HttpError(
            400,
            f"There are {count} inputs; the header of encoding_format bytes has room for {_MOST_PLACES}.",
            "Send fewer at a time, or set encoding_format to bytes_only or base64.",
            param="encoding_format",
        )


def packed(vectors: Sequence[Any], kind: str, order: str, head: Mapping[str, Any] | None) -> VectorBody:
    """Return tensors as one body.

    Args:
        kind, order: the number type and byte order, see api/vector_bytes.py.
        head: what the header says besides the places; None for no header.
    """
    parts, places, start = [], [], 0
    for index, vector in enumerate(vectors):
        part = to_bytes(vector, kind, order)
        stop = start + len(part)
        place = {"index": index, "embed_dtype": kind, "endianness": order, "start": start, "end": stop}
        places.append(place | {"shape": list(vector.shape)})
        parts.append(part)
        start = stop
    return VectorBody(b"".join(parts), None if head is None else {**head, "data": places})


def response(answer: VectorBody | Mapping[str, Any]) -> Response:
    """Return the answer of a route of vectors: JSON, or the bare bytes."""
    if not isinstance(answer, VectorBody):
        return JSONResponse(answer)
    headers = {} if answer.places is None else {"metadata": json.dumps(answer.places, separators=(",", ":"))}
    return Response(answer.data, media_type="application/octet-stream", headers=headers)
