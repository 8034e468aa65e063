"""``python -m posttrain`` is ``posttrain``."""

from posttrain.cli.start import main

if __name__ == "__main__":
    main()
