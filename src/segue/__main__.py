"""``python -m segue``."""

from segue.cli.entry import main

if __name__ == "__main__":
    main()
