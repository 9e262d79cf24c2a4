"""What TRL's client needs of an installed vLLM to be imported: a version, and the names that it imports.

Nothing here is called while a client only generates and scores.
"""

__version__ = "0.31.0"


class LLM:
    """An engine in the client's process."""


class RequestOutput:
    """What such an engine gives."""


class SamplingParams:
    """What it is asked for."""
