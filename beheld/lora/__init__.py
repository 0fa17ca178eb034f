"""LoRA adapters: read and checked, kept in slots, added to the layers of a loaded model."""
