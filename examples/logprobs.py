"""How sure is the model? The log-probability of each token, and its closest rivals.

python examples/logprobs.py
"""

import argparse
import math
from pathlib import Path

from beheld import LLM, SamplingParams

HERE = Path(__file__).parent

parser = argparse.ArgumentParser()
parser.add_argument("--model", help="a folder or a hub name; without it the embedded model answers")
parser.add_argument("--image", type=Path, default=HERE / "scene.png")
parser.add_argument("--question", default="What colour is the circle?")
arguments = parser.parse_args()

# --8<-- [start:logprobs]
with LLM(arguments.model, max_model_len=4096) as llm:
    content = [
        {"type": "image", "image": arguments.image},
        {"type": "text", "text": arguments.question},
    ]
    params = SamplingParams(temperature=0, max_tokens=16, logprobs=3)
    (output,) = llm.chat([{"role": "user", "content": content}], params, use_tqdm=False)
    answer = output.outputs[0]
    for token, candidates in zip(answer.token_ids, answer.logprobs, strict=True):
        chosen = candidates[token]
        rivals = [f"{c.decoded_token!r} {math.exp(c.logprob):.1%}" for i, c in candidates.items() if i != token]
        print(f"{chosen.decoded_token!r:>12} {math.exp(chosen.logprob):6.1%}   {', '.join(rivals)}")
    print(f"all of it: {math.exp(answer.cumulative_logprob):.1%}")
# --8<-- [end:logprobs]
