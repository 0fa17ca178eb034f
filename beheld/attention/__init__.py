"""Attention over the paged KV cache: q, k, v and metadata in, o out."""
