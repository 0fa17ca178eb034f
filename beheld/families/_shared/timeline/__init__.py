"""What models share whose tokens keep time with an audio."""
