"""Orthogonal equivalence W = R W0 P (POET): W0 stays, R and P are learned."""
