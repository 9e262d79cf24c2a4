"""The paged KV cache: pool, tables, page allocator, prefix cache."""
