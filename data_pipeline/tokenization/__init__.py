"""Tokenizers: reading, training, and encoding many words at once."""
