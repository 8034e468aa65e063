"""Small packages that the tasks of repair are made from: right as they stand here, each with calls to test it by."""
