"""Decisions of asynchronous training, free of models and clocks: the groups that are sampled ahead, and when each is trained."""
