"""verl's dataset, for classes of users' that inherit from it; ``libraries.verl`` makes it importable as verl's."""
