"""Optimizer-state offloading that never changes the numbers."""
