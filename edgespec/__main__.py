"""`python -m edgespec` is the command `edgespec`."""

from edgespec.cli.supervised import main

if __name__ == "__main__":
    main()
