"""Text laid out in lines."""
