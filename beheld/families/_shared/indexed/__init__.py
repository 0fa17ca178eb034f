"""Latent attention whose indexer picks the positions that a query sees: run where it picks all of them."""
