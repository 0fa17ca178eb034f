"""InternLM2's tokenizer, which its own models and those around InternViT have."""
