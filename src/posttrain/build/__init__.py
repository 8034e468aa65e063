"""The one place where names in a config become objects: a file per entry point, and the pieces that they share."""
