"""What each kind of layer group keeps on the device, in blocks: one file per kind, and a coordinator over them."""
