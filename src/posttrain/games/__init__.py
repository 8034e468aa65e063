"""Games played in text: what those among the environments share, and what a game of your own builds on."""
