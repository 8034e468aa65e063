"""verl's surface for classes of datasets and samplers that were written for it, in the process that runs them.

docs/own-classes.md lists what they are given. ``libraries.verl_modules`` makes these names importable as verl's.
"""
