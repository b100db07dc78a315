"""Text in and out: tokenizers, chat templates, and a model with its tokenizer."""
