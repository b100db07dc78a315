"""Prefill and decode of whole models: generation, sampling, the cache and the layer loop."""
