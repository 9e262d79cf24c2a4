"""Guided output."""


class StructuredOutputsParams:
    """A pattern that the output has to fit."""
