"""A store: what is there, and what it costs."""
