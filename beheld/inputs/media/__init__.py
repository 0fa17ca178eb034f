"""Media as items: decoding, frames, digests, processors, receipts, cache, workers."""
