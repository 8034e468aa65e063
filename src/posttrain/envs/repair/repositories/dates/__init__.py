"""Days of the calendar."""
