"""The terminal viewer of a run folder, opened by ``posttrain show``."""
