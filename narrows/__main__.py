"""`python -m narrows` is the program `narrows`."""

from narrows.cli import main

if __name__ == "__main__":
    main()
