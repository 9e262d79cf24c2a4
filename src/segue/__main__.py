"""``python -m segue``."""

from segue.cli.main import main

if __name__ == "__main__":
    main()
