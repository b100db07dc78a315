"""Instructions and layouts that kernels of several operations share."""
