"""The two front doors: LLM for scripts, AsyncLLM for servers."""
