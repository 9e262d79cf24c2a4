"""``python -m segue``."""

from segue.cli import main

if __name__ == "__main__":
    main()
