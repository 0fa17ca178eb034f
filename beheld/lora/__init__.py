"""LoRA adapters: validated when read, cached in slots, and applied in the layers of a loaded model."""
