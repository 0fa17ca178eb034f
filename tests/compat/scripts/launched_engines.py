"""Each process of torchrun has an engine and answers its part of the prompts, and the first one alone prints."""

import argparse

import torch.distributed as dist
from vllm import LLM, SamplingParams

parser = argparse.ArgumentParser()
parser.add_argument("--model")
llm = LLM(
    model=parser.parse_args().model,
    data_parallel_size=2,
    distributed_executor_backend="external_launcher",
    max_model_len=64,
    seed=1,
)
own_part = llm.llm_engine.vllm_config.parallel_config
number, engines = own_part.data_parallel_rank, own_part.data_parallel_size
prompts = [prompt for place, prompt in enumerate(["Hello", "The sky is", "One"]) if place % engines == number]
params = SamplingParams(temperature=1.0, top_p=0.95, max_tokens=8, ignore_eos=True)
own = number, engines, [output.prompt for output in llm.generate(prompts, params)]
everyones = [None] * dist.get_world_size()
dist.all_gather_object(everyones, own)
if dist.get_rank() == 0:
    print(everyones)
