"""What encoder-decoders that read one image share."""
