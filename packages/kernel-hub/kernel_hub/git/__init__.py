"""One repository: its git objects, refs and commits."""
