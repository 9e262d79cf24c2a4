"""The part of a weight update that rank 0 decides, without torch."""
