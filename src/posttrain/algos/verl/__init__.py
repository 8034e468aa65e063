"""Functions written for verl: estimators and losses of a user's, and the names of verl's own module that they import."""
