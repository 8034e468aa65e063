"""verl's surface for classes that were written for it, in the process that runs them; docs/own-classes.md lists it.

``modules`` makes the names importable as verl's; what needs datasets or rewards is in ``data.verl`` and ``rewards.verl``.
"""
