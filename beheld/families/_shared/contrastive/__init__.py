"""Models with a tower for text and one for images, whose vectors share a space."""
