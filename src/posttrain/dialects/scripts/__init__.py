"""Launch scripts: the trainer's command line that a shell script builds, found without running the script."""
