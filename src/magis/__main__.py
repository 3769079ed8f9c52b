"""`python -m magis`: the command line."""

from magis.cli.main import main

if __name__ == "__main__":
    main()
