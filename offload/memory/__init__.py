"""Arenas, and the memory nodes and cores that they are touched from."""
