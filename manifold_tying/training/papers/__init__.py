"""The papers' comparisons as recipes."""
