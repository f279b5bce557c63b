"""Set up by its owner."""
