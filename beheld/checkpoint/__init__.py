"""Finding a checkpoint and reading what it says of itself, without its weights."""
