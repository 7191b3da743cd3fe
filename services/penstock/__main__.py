"""`python -m penstock` is `penstock`."""

from penstock.cli.app import main

if __name__ == "__main__":
    main()
