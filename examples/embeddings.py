"""Vectors of texts, and which text goes best with an image.

python examples/embeddings.py
"""

import argparse
from pathlib import Path

from beheld import LLM

HERE = Path(__file__).parent

parser = argparse.ArgumentParser()
parser.add_argument("--model", help="a folder or a hub name; the embedded model was not trained for this")
parser.add_argument("--image", type=Path, default=HERE / "scene.png")
arguments = parser.parse_args()

# --8<-- [start:embed]
TEXTS = ["A red circle and a blue square.", "A cat sleeps on a chair."]

with LLM(arguments.model, runner="pooling", max_model_len=2048) as llm:
    for text, output in zip(TEXTS, llm.embed(TEXTS, use_tqdm=False), strict=True):
        print(f"{len(output.outputs.embedding)} numbers for {text}")

    image = {"content": [{"type": "image", "image": arguments.image}, {"type": "text", "text": "Describe the image."}]}
    for text, output in zip(TEXTS, llm.score(image, TEXTS, use_tqdm=False), strict=True):
        print(f"{output.outputs.score:.3f} {text}")
# --8<-- [end:embed]
