"""A conversation of several turns about an image; the answers appear as they grow.

python examples/chat.py
python examples/chat.py --image photo.jpg --questions "What is this?" "And its colour?"
"""

import argparse
from pathlib import Path

from beheld import LLM, SamplingParams

HERE = Path(__file__).parent

parser = argparse.ArgumentParser()
parser.add_argument("--model", help="a folder or a hub name; without it the embedded model answers")
parser.add_argument("--image", type=Path, default=HERE / "scene.png")
parser.add_argument("--questions", nargs="+", default=["What is in this picture?", "What colour is the square?"])
arguments = parser.parse_args()

# --8<-- [start:chat]
with LLM(arguments.model, max_model_len=4096) as llm:
    messages = []
    image = {"type": "image", "image": arguments.image}
    for question in arguments.questions:
        print(">", question)
        # Only the first turn shows the image. Later turns hold it in their history, where it is found in the caches.
        shown = [] if messages else [image]
        messages.append({"role": "user", "content": [*shown, {"type": "text", "text": question}]})
        answer = ""
        for piece in llm.chat_stream(messages, SamplingParams(temperature=0, max_tokens=128)):
            answer += piece.outputs[0].text
            print(piece.outputs[0].text, end="", flush=True)
        print(f"   ({piece.num_cached_tokens} prompt tokens came from the cache)")
        messages.append({"role": "assistant", "content": answer})
# --8<-- [end:chat]
