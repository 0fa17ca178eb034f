"""Two processes, each a rank that answers its part of the prompts."""

import argparse
import os
from multiprocessing import Process

from vllm import LLM, SamplingParams
from vllm.utils import get_open_port

PROMPTS = [f"Prompt {number}" for number in range(6)]


def answer(model, rank, size, port):
    os.environ |= {"VLLM_DP_RANK": str(rank), "VLLM_DP_SIZE": str(size), "VLLM_DP_MASTER_PORT": str(port)}
    os.environ |= {"VLLM_DP_MASTER_IP": "127.0.0.1", "CUDA_VISIBLE_DEVICES": str(rank)}
    llm = LLM(model=model, enforce_eager=True, enable_expert_parallel=True, max_model_len=64)
    for output in llm.generate(PROMPTS[rank::size], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)):
        print(f"rank {rank} of {size}: {output.prompt}: {len(output.outputs[0].token_ids)} tokens", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    model = parser.parse_args().model
    port = get_open_port()
    ranks = [Process(target=answer, args=(model, rank, 2, port)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    raise SystemExit(max(rank.exitcode for rank in ranks))
