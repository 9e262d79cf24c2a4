"""The paged KV cache: pool, page table, page allocator, prefix cache."""
