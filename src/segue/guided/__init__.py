"""Guided output: from a client's grammar to the tokens that may come next; llguidance does the parsing."""
