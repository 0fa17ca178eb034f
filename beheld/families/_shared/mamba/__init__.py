"""What families with the state spaces of Mamba-1 and Mamba-2 share."""
