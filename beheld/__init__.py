"""beheld: an engine for vision-, video- and audio-language models."""
