"""The arena of the weights, the memory budget, and operations on tensors beside the steps."""
