"""The vocabulary: frozen dataclasses that both halves of the engine use."""
