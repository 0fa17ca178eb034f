"""Let a model call a function about what it sees, and give it the function's result.

The server makes the model follow the function's schema, so even the embedded model, which never learned to call tools,
gives arguments that can be read. With a model that did learn it, use --choice auto.

beheld serve
python examples/tools.py
"""

import argparse
import base64
import json
from pathlib import Path

from openai import OpenAI

HERE = Path(__file__).parent

parser = argparse.ArgumentParser()
parser.add_argument("--url", default="http://127.0.0.1:8000")
parser.add_argument("--image", type=Path, default=HERE / "scene.png")
parser.add_argument("--choice", default="required", choices=["required", "auto"])
arguments = parser.parse_args()

client = OpenAI(base_url=f"{arguments.url}/v1", api_key="EMPTY")
model = client.models.list().data[0].id
encoded = base64.b64encode(arguments.image.read_bytes()).decode()

# --8<-- [start:tools]
shapes = ["circle", "square", "triangle", "star", "heart", "cross"]
tools = [
    {
        "type": "function",
        "function": {
            "name": "find_part",
            "description": "Look up a part in the stock list by its shape.",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"shape": {"type": "string", "enum": shapes}},
                "required": ["shape"],
                "additionalProperties": False,
            },
        },
    }
]


def find_part(shape: str) -> str:
    """The function that the model may call."""
    return json.dumps({"shape": shape, "in_stock": 12})


messages = [
    {
        "role": "user",
        "content": [
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded}"}},
            {"type": "text", "text": "Which shape is at the top left?"},
        ],
    }
]
answer = client.chat.completions.create(
    model=model, messages=messages, tools=tools, tool_choice=arguments.choice, temperature=0, max_tokens=128
)
message = answer.choices[0].message
for call in message.tool_calls or []:
    given = json.loads(call.function.arguments)
    result = find_part(**given)
    print(f"{call.function.name}({given}) -> {result}")
    # The next request holds the call and its result; the model answers with both in view.
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": result}]
# --8<-- [end:tools]
