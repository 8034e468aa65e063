"""Plans: tasks that wait for others."""
