"""The version of Segue."""

__version__ = "0.1.0"
