"""Inference of whole models: prefill, decode, generation, sampling, cache and layer loop."""
