"""`python -m commjax` is the command line."""

from commjax.cli.main import main

if __name__ == "__main__":
    main()
