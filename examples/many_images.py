"""Two ways to give many images: several in one question, and one question for each of many.

python examples/many_images.py
python examples/many_images.py --model Qwen/Qwen2.5-VL-3B-Instruct --images a.jpg b.jpg c.jpg
"""

import argparse
from pathlib import Path

from PIL import Image

from beheld import LLM, SamplingParams

HERE = Path(__file__).parent

parser = argparse.ArgumentParser()
parser.add_argument("--model", help="a folder or a hub name; without it the embedded model answers")
parser.add_argument("--images", type=Path, nargs="+", default=[HERE / f"two_pictures_{letter}.png" for letter in "ab"])
arguments = parser.parse_args()
params = SamplingParams(temperature=0, max_tokens=128)

with LLM(arguments.model, max_model_len=4096, limit_mm_per_prompt={"image": 16}) as llm:
    # --8<-- [start:one]
    # Several images in one question; they stand in the prompt where they stand in the list.
    parts = [{"type": "image", "image": path} for path in arguments.images]
    question = {"type": "text", "text": "What is the content of each image?"}
    (output,) = llm.chat([{"role": "user", "content": [*parts, question]}], params)
    print("together:", output.outputs[0].text)
    # --8<-- [end:one]

    # --8<-- [start:each]
    # One question for each image. All of them are given at once, so that they share the device's steps.
    # An image may be a Path, a URL, bytes or, as here, a PIL image.
    conversations = [
        [
            {
                "role": "user",
                "content": [
                    {"type": "image", "image": Image.open(path)},
                    {"type": "text", "text": "What is in this picture?"},
                ],
            }
        ]
        for path in arguments.images
    ]
    for path, output in zip(arguments.images, llm.chat(conversations, params), strict=True):
        print(f"{path.name}: {output.outputs[0].text}")
    # --8<-- [end:each]
