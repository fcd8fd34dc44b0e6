"""python -m manifold_tying."""

from manifold_tying.cli import main

if __name__ == "__main__":
    main()
