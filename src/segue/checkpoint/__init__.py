"""From a name or a directory to weights in memory: sources, hub, caches, file formats."""
