"""What the device holds for each kind of layer group: one file per kind, the other halves of `scheduler/cache/`."""
