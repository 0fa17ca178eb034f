"""Sampling: from logits to token ids, batched on the device."""
