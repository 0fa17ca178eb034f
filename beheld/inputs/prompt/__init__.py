"""Turns prompts and conversations into token ids: templates, rendering, tokenizing, special tokens, expansion."""
