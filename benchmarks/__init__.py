"""Side-by-side measurements; each module is a command: python -m benchmarks.NAME."""
