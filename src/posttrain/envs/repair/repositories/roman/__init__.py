"""Roman numbers."""
