"""Instructions and layouts shared by the kernels."""
