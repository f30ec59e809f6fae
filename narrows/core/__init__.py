"""Plain values that every part speaks in. Standard library only."""
