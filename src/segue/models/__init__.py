"""Model architectures and their configuration."""
