"""python -m manifold_tying: the same as the command manifold-tying."""

from manifold_tying.training.cli import main

if __name__ == "__main__":
    main()
