"""What the entry points of `scripts/` are made of; imported, never run."""
