"""A run folder in the terminal: what ``posttrain show`` opens."""
