"""Everything that touches a device tensor."""
