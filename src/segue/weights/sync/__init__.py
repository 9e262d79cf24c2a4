"""Weight updates while the engine serves."""
