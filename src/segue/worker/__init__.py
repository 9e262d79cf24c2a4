"""The worker processes, one per tensor-parallel rank."""
