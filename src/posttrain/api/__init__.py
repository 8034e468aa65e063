"""The package as a library, for notebooks and programs: the commands' work without the command line (docs/library.md)."""
