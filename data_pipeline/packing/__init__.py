"""How the sentences of a block become sequences and pairs."""
