"""Reading and training tokenizers, and encoding text with them."""
