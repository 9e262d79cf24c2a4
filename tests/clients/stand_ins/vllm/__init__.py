"""What TRL's client needs of an installed vLLM to be imported: a version, and the names that it imports.

Nothing here is called while a client only generates and scores.
"""

__version__ = "0.31.0"
