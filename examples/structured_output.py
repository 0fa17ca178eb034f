"""Answers of a fixed form: one of several words, a pattern, or JSON that follows a schema.

A grammar decides the form, the model the content: the embedded model never learned JSON, so its JSON is valid and may
be wrong.

python examples/structured_output.py
"""

import argparse
import json
from pathlib import Path

from beheld import LLM, SamplingParams
from beheld.core.params import StructuredOutputs

HERE = Path(__file__).parent

parser = argparse.ArgumentParser()
parser.add_argument("--model", help="a folder or a hub name; without it the embedded model answers")
parser.add_argument("--image", type=Path, default=HERE / "scene.png")
arguments = parser.parse_args()

with LLM(arguments.model, max_model_len=4096) as llm:

    def ask(question: str, form: StructuredOutputs) -> str:
        """One answer in the given form."""
        content = [
            {"type": "image", "image": arguments.image},
            {"type": "text", "text": question},
        ]
        params = SamplingParams(temperature=0, max_tokens=128, structured_outputs=form)
        (output,) = llm.chat([{"role": "user", "content": content}], params, use_tqdm=False)
        return output.outputs[0].text

    # --8<-- [start:forms]
    colours = ["red", "orange", "yellow", "green", "blue", "purple"]
    print("choice:", ask("What colour is the circle?", StructuredOutputs(choice=colours)))

    count = StructuredOutputs(regex=r"There (is|are) (one|two|three|four) shapes?")
    print("regex:", ask("How many shapes are there?", count))

    schema = {
        "type": "object",
        "properties": {"shape": {"enum": ["circle", "square", "star"]}, "colour": {"enum": colours}},
        "required": ["shape", "colour"],
        "additionalProperties": False,
    }
    text = ask("Which shape is at the top left?", StructuredOutputs(json=schema))
    print("json:", json.loads(text))
    # --8<-- [end:forms]
