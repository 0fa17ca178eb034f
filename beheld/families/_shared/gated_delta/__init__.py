"""What families with the gated delta rule share."""
