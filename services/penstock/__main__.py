"""`python -m penstock` is `penstock`."""

from penstock.cli.start import main

if __name__ == "__main__":
    main()
