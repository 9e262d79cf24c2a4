"""The frontend: requests and their streams, tokenization, detokenization, and the workers' health."""
