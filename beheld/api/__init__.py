"""The two entry points: LLM for scripts, AsyncLLM for servers."""
