"""Prompts and conversations as token ids: templates, rendering, tokenizing, special tokens, expansion."""
