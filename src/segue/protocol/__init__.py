"""What crosses a process border: structs and request bodies, no logic."""
