"""Tables of numbers, as lists of rows."""
