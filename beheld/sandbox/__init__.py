"""Work on untrusted input in processes that can be killed, and messages between processes without pickle."""
