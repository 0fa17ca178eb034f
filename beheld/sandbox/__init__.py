"""Work on what strangers sent, in processes that can be killed; and the wire between processes, without pickle."""
