"""The paged KV cache: pool, page table, prefix cache."""
