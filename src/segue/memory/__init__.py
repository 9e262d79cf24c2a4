"""Layout and arena of the weights, where memory comes from, the memory budget, and copies beside the steps."""
