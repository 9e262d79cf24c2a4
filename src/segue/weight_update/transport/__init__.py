"""How weights travel from a trainer to a rank: process groups and broadcasts."""
