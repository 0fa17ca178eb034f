"""What encoder-decoders that hear share."""
