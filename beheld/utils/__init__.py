"""Leaves: small things that everyone may use and that use no one."""
