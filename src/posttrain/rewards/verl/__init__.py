"""verl's surface for reward managers that were written for it, in the process that runs them; see docs/own-classes.md."""
