"""Several processes that share one model: their collectives, and which part of a weight each of them holds."""
