"""What decoders after an encoder of one item share."""
