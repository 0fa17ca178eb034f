"""Each process of torchrun runs this, and the first one alone prints."""

import argparse

import torch.distributed as dist
from vllm import LLM, SamplingParams

parser = argparse.ArgumentParser()
parser.add_argument("--model")
llm = LLM(
    model=parser.parse_args().model,
    tensor_parallel_size=2,
    distributed_executor_backend="external_launcher",
    max_model_len=64,
)
# No seed is given, and yet all processes draw the same tokens.
params = SamplingParams(temperature=1.0, top_p=0.95, max_tokens=8, ignore_eos=True)
own = [list(output.outputs[0].token_ids) for output in llm.generate(["Hello", "The sky is"], params)]
everyones = [None] * dist.get_world_size()
dist.all_gather_object(everyones, own)
if dist.get_rank() == 0:
    print(f"{len(everyones)} processes, {len(own)} answers, the same: {all(each == own for each in everyones)}")
