"""Process groups, tensor-parallel collectives, rank information."""
