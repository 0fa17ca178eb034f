"""What encoder-decoders that are made of two published models share."""
