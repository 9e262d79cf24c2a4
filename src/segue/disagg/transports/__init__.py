"""The ways of moving KV pages into another process: one interface, and one module per way."""
