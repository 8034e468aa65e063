"""Maps of squares: walls (#) and ways (.)."""
