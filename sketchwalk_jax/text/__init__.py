"""Handles text: tokenizers, chat templates, and a model with its tokenizer."""
