"""Formulas of whole numbers."""
