"""Decode matmul with stacked weights, and SwiGLU quantized to float8."""
