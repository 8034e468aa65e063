"""Codes for texts and numbers."""
