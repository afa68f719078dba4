"""`python -m colonnade` is the `colonnade` command."""

from colonnade.cli import main

if __name__ == "__main__":
    main()
