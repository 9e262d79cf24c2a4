"""The memory service: weights and KV memory that outlive the engines which use them."""
