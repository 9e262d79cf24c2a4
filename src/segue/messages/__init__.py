"""What crosses a process border: structs, no logic."""
