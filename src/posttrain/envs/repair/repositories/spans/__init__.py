"""Spans of whole numbers: [first, end], the end not included."""
