"""A league: games, points and places."""
