"""Ask a running server with OpenAI's own client.

beheld serve
python examples/openai_client.py
"""

import argparse
import base64
from pathlib import Path

from openai import OpenAI

HERE = Path(__file__).parent

parser = argparse.ArgumentParser()
parser.add_argument("--url", default="http://127.0.0.1:8000")
parser.add_argument("--api-key", default="EMPTY", help="what the server was given with --api-key")
parser.add_argument("--image", type=Path, default=HERE / "scene.png")
parser.add_argument("--question", default="What is in this picture?")
arguments = parser.parse_args()

# --8<-- [start:ask]
client = OpenAI(base_url=f"{arguments.url}/v1", api_key=arguments.api_key)
model = client.models.list().data[0].id

# A file of this machine travels in the request itself; the server could fetch a public address, too.
encoded = base64.b64encode(arguments.image.read_bytes()).decode()
parts = [
    {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded}"}},
    {"type": "text", "text": arguments.question},
]
answer = client.chat.completions.create(
    model=model, messages=[{"role": "user", "content": parts}], temperature=0, max_tokens=128
)
print(answer.choices[0].message.content)
print(f"{answer.usage.prompt_tokens} tokens in, {answer.usage.completion_tokens} out")
# Beyond OpenAI's fields: one receipt for each item.
print("the model saw:", answer.model_extra["media"][0]["used"])
# --8<-- [end:ask]
