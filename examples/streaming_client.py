"""Print a server's answer as it grows, and measure when its first token came.

beheld serve
python examples/streaming_client.py
"""

import argparse
import base64
import time
from pathlib import Path

from openai import OpenAI

HERE = Path(__file__).parent

parser = argparse.ArgumentParser()
parser.add_argument("--url", default="http://127.0.0.1:8000")
parser.add_argument("--image", type=Path, default=HERE / "scene.png")
parser.add_argument("--question", default="What is in this picture?")
arguments = parser.parse_args()

client = OpenAI(base_url=f"{arguments.url}/v1", api_key="EMPTY")
encoded = base64.b64encode(arguments.image.read_bytes()).decode()
parts = [
    {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded}"}},
    {"type": "text", "text": arguments.question},
]

# --8<-- [start:stream]
start = time.monotonic()
first = None
stream = client.chat.completions.create(
    model=client.models.list().data[0].id,
    messages=[{"role": "user", "content": parts}],
    temperature=0,
    max_tokens=128,
    stream=True,
    stream_options={"include_usage": True},
)
for chunk in stream:
    if chunk.choices and chunk.choices[0].delta.content:
        first = first or time.monotonic() - start
        print(chunk.choices[0].delta.content, end="", flush=True)
    if chunk.usage:
        print(f"\n{chunk.usage.completion_tokens} tokens; the first came after {first:.2f} s")
# --8<-- [end:stream]
