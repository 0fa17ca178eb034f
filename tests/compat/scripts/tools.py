"""A call of a tool by a model in Mistral's own layout, and the answer after it."""

import json

from vllm import LLM
from vllm.sampling_params import SamplingParams

llm = LLM(
    model="mistralai/Mistral-7B-Instruct-v0.3",
    tokenizer_mode="mistral",
    config_format="mistral",
    load_format="mistral",
)
place = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
tools = [{"type": "function", "function": {"name": "weather", "description": "Tell it", "parameters": place}}]
messages = [{"role": "user", "content": "How warm is it in Dallas?"}]
params = SamplingParams(max_tokens=64, temperature=0.0)
said = llm.chat(messages, params, tools=tools)[0].outputs[0].text
print("calls", [call["name"] for call in json.loads(said)])
messages += [
    {"role": "assistant", "content": said},
    {"role": "tool", "content": "85 degrees", "tool_call_id": "a1b2c3d4e"},
]
print("says", llm.chat(messages, params, tools=tools)[0].outputs[0].text)
