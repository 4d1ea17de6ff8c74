"""Packing the sentences of a block into sequences and pairs."""
