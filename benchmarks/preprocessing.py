"""Preparing a picture: milliseconds for a new one and for one that was seen before, through mote's own processor.

    python -m benchmarks.preprocessing [--width 448 --height 448]

Prints one JSON line per kind of source: medians over 50 pictures, each prepared once new and three times again.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from beheld.inputs.pipeline import RequestOrder


def sources(width: int, height: int, folder: Path) -> dict[str, list[Any]]:
    """Fifty noise pictures, as PIL images, arrays, bytes of PNG files, and paths."""
    import numpy as np
    from PIL import Image

    rng = np.random.default_rng(0)
    arrays = [rng.integers(0, 256, (height, width, 3), dtype=np.uint8) for _ in range(50)]
    made: dict[str, list[Any]] = {"array": arrays, "PIL": [Image.fromarray(a) for a in arrays], "bytes": [], "path": []}
    for number, picture in enumerate(made["PIL"]):
        buffer = io.BytesIO()
        # Other pixels than those of the arrays, so that no source finds another's pictures in the cache.
        picture.rotate(180).save(buffer, "PNG")
        made["bytes"].append(buffer.getvalue())
        path = folder / f"{number}.png"
        picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(path)
        made["path"].append(path)
    return made


def main() -> None:
    """Prepare each source's pictures and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=448)
    parser.add_argument("--height", type=int, default=448)
    arguments = parser.parse_args()
    from beheld import LLM, SamplingParams

    llm = LLM(max_num_seqs=1, use_tqdm_on_load=False)
    params = SamplingParams(temperature=0, max_tokens=1)
    pipeline = llm._inputs

    def once(picture: Any) -> float:
        start = time.perf_counter()
        pipeline.prepare(
            RequestOrder(
                {"prompt": "<|vision_start|><|image_pad|><|vision_end|>What?", "multi_modal_data": {"image": picture}},
                params,
                request_id="0",
            )
        )
        return 1e3 * (time.perf_counter() - start)

    with tempfile.TemporaryDirectory() as folder:
        for kind, pictures in sources(arguments.width, arguments.height, Path(folder)).items():
            # The arrays are the PIL images' pixels: what one leaves in the cache, the other would find.
            pipeline.cache.clear()
            once(pictures[0])
            pipeline.cache.clear()
            new = [once(picture) for picture in pictures]
            again = [once(picture) for _ in range(3) for picture in pictures]
            figures = {"new_ms": round(statistics.median(new), 3), "seen_ms": round(statistics.median(again), 3)}
            print(json.dumps({"source": kind, "size": [arguments.width, arguments.height], **figures}))


if __name__ == "__main__":
    main()
