"""Kernels of the walk policy (Algorithms 1 and 2)."""
