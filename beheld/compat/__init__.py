"""`vllm` module paths as aliases of ours, so that a script which imports vllm runs unmodified."""
