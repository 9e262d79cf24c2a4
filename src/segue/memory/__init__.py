"""Layout and arena of the weights, where memory comes from, its budget, and copies beside the steps."""
