"""Several threads at once, imports that stay light, and worker threads for many items."""

from __future__ import annotations

import io
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from PIL import Image

from beheld.core.errors import DecodeError
from beheld.inputs.pipeline import Chat, RequestOrder
from tests import tiny
from tests.inputs import pipes


def test_many_threads_give_what_one_gives() -> None:
    family = "qwen2_vl"
    pipe, alone = pipes.make(family, {"processor_cache_bytes": 100_000}), pipes.shared(family)
    pictures = [tiny.picture(56 + 14 * (n % 5), 70, n % 7) for n in range(24)]
    special = "<|im_end|> and <|image_pad|>"

    def one(index: int) -> tuple[object, ...]:
        content = [{"type": "image", "image": pictures[index]}, special if index % 2 else "What?"]
        request = pipe.prepare(
            RequestOrder(Chat([{"role": "user", "content": content}]), pipes.ONE_TOKEN, request_id=str(index))
        )
        return request.token_ids, request.spans[0].item.digest

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(one, range(24)))
    for index, (ids, digest) in enumerate(found):
        content = [{"type": "image", "image": pictures[index]}, special if index % 2 else "What?"]
        request = alone.prepare(
            RequestOrder(Chat([{"role": "user", "content": content}]), pipes.ONE_TOKEN, request_id="0")
        )
        assert (ids, digest) == (request.token_ids, request.spans[0].item.digest)


def test_workers_keep_order_and_errors() -> None:
    family = "llava"
    pipe = pipes.make(family, {"media_workers": 3})
    pictures = [tiny.picture(56 + n, 56, n) for n in range(6)]
    threaded = pipes.ask(pipe, family, pictures)
    assert threaded.token_ids == pipes.ask(pipes.shared(family), family, pictures).token_ids
    digests = [span.item.digest for span in pipes.ask(pipes.shared(family), family, pictures).spans]
    assert [span.item.digest for span in threaded.spans] == digests
    with pytest.raises(DecodeError) as caught:
        pipes.ask(pipe, family, [pictures[0], b"bad", pictures[1], b"worse"])
    assert caught.value.item == "image 2"
    pipe.close()


LIGHT = """
import sys
from pathlib import Path
import beheld.inputs.pipeline
assert "torch" not in sys.modules, "torch"
assert "transformers" not in sys.modules, "transformers"
from beheld.checkpoint.info import read_info
from beheld.core.config import EngineArgs, EngineConfig
from beheld.core.params import SamplingParams
args = EngineArgs(model=sys.argv[1])
info = read_info(Path(sys.argv[1]), args)
config = EngineConfig("cpu", "float32", "float32", 512, 1, 512, 16, 512, 0, {})
pipe = beheld.inputs.pipeline.InputPipeline(info, config, args)
from beheld.inputs.pipeline import Chat, RequestOrder
assert pipe.prepare(RequestOrder("Hi", SamplingParams(), "0")).token_ids
talk = [{"role": "user", "content": "Hi <|im_end|>"}]
assert pipe.prepare(RequestOrder(Chat(talk), SamplingParams(), "0")).token_ids
for name in ("torchvision", "av"):
    assert name not in sys.modules, name
"""


def test_text_alone_loads_no_torchvision() -> None:
    script = [sys.executable, "-c", LIGHT, str(tiny.checkpoint("qwen2"))]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def opened(form: str) -> Any:
    """A picture as `Image.open` gives it: nothing of it is read yet, but for its header."""
    noise = np.random.default_rng(0).integers(0, 256, (60, 80, 3), dtype=np.uint8)
    pictures = [Image.fromarray(np.kron(np.roll(noise, n), np.ones((8, 8, 1), np.uint8))) for n in range(3)]
    options: dict[str, Any] = {"save_all": True, "append_images": pictures[1:]} if form in ("TIFF", "GIF") else {}
    first = pictures[0]
    if form == "JPEG":
        tags = first.getexif()
        tags[0x0112] = 6
        options["exif"] = tags
    if form == "PNG":
        first = first.convert("P")
    file = io.BytesIO()
    first.save(file, form, **options)
    return Image.open(io.BytesIO(file.getvalue()))


@pytest.mark.parametrize("form", ["JPEG", "PNG", "BMP", "TIFF", "GIF"])
@pytest.mark.parametrize("kind", ["image", "video"])
def test_one_opened_picture_in_prompts_of_many_threads(form: str, kind: str) -> None:
    """Pillow reads it when it is first asked for, seeks in it and reads its tags, none of that for several threads."""
    family = "llava" if kind == "image" else "qwen2_vl"
    pipe = pipes.make(family)

    def digests(picture: Any) -> bytes:
        items = (picture, None) if kind == "image" else (None, [[picture, picture]])
        return pipes.ask(pipe, family, *items).spans[0].item.digest

    wanted = digests(opened(form))
    found = set()
    with ThreadPoolExecutor(8) as threads:
        for _ in range(12):
            shared, gate = opened(form), threading.Barrier(8)

            def one(shared: Any = shared, gate: Any = gate) -> bytes:
                gate.wait()
                return digests(shared)

            found |= {future.result() for future in [threads.submit(one) for _ in range(8)]}
    assert found == {wanted}
