"""The command manifold-tying, and python -m manifold_tying."""

import sys


def main() -> None:
    """Run the command line; exit status 2 where its packages are not installed."""
    try:
        from manifold_tying._extra import needs_extra

        with needs_extra("train", "training and the command line need"):
            from manifold_tying.training.cli import main as command
    except ModuleNotFoundError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    command()


if __name__ == "__main__":
    main()
