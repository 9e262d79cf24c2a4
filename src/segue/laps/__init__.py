"""Length-aware prefill scheduling (LAPS): short prompts do not wait behind long ones.

Everything here is pure: plain data in, plain data out, and times come from the caller's monotonic clock.
"""
