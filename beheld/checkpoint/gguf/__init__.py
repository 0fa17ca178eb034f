"""GGUF files: read as ordinary checkpoints, whose other files are made of the file's metadata."""
