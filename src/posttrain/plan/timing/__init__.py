"""Seconds of a step on a machine that need not be here, and the placement that takes the fewest."""
