"""Random answers that come out the same again: the seed belongs to the request, not to the batch.

python examples/reproducible_sampling.py
"""

import argparse
from pathlib import Path

from beheld import LLM, SamplingParams

HERE = Path(__file__).parent

parser = argparse.ArgumentParser()
parser.add_argument("--model", help="a folder or a hub name; without it the embedded model answers")
arguments = parser.parse_args()


def about(path: Path) -> list:
    """A conversation about one image."""
    content = [
        {"type": "image", "image": path},
        {"type": "text", "text": "Describe this picture."},
    ]
    return [{"role": "user", "content": content}]


# --8<-- [start:seeds]
with LLM(arguments.model, max_model_len=4096, dtype="float32") as llm:
    params = SamplingParams(temperature=1.0, top_p=0.95, seed=7, max_tokens=48)
    (alone,) = llm.chat(about(HERE / "scene.png"), params)

    # The same request among others: the others change nothing.
    names = ["sign.png", "scene.png", "two_pictures_a.png", "two_pictures_b.png"]
    crowd = llm.chat([about(HERE / name) for name in names], params)
    print(alone.outputs[0].text)
    print("the same tokens in a batch:", alone.outputs[0].token_ids == crowd[1].outputs[0].token_ids)

    # Several answers to one question, each with a seed of its own that follows from the request's.
    several = SamplingParams(n=3, temperature=1.0, seed=7, max_tokens=48)
    (output,) = llm.chat(about(HERE / "scene.png"), several)
    for answer in output.outputs:
        print(f"{answer.index}: {answer.text}")
# --8<-- [end:seeds]
