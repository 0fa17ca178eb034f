"""What decoders behind an encoder of one item share."""
