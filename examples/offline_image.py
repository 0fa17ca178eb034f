"""Ask a model about one image, in Python, without a server.

python examples/offline_image.py
python examples/offline_image.py --model Qwen/Qwen2.5-VL-3B-Instruct --image photo.jpg --question "What is this?"
"""

import argparse
from pathlib import Path

from beheld import LLM, SamplingParams

HERE = Path(__file__).parent

parser = argparse.ArgumentParser()
parser.add_argument("--model", help="a folder or a hub name; without it the embedded model answers")
parser.add_argument("--image", type=Path, default=HERE / "scene.png")
parser.add_argument("--question", default="What is in this picture?")
arguments = parser.parse_args()

# --8<-- [start:ask]
with LLM(arguments.model, max_model_len=4096) as llm:
    messages = [
        {
            "role": "user",
            "content": [
                {"type": "image", "image": arguments.image},
                {"type": "text", "text": arguments.question},
            ],
        }
    ]
    (output,) = llm.chat(messages, SamplingParams(temperature=0, max_tokens=128))
    print(output.outputs[0].text)
# --8<-- [end:ask]
