"""Values between processes: as bytes without pickle, over a pair of sockets on one host or over TCP between hosts."""
