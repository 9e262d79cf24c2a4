"""Prefill/decode disaggregation: handing over the KV of prompts from one worker to another."""
