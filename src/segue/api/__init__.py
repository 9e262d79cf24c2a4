"""Every dialect that a client may speak, without HTTP: OpenAI, native, control, weights, and Python."""
