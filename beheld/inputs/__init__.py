"""Messages and media become requests: everything on the host's side, without weights and without a GPU."""
