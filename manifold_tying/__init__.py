"""Manifold-constrained parametrizations, Riemannian optimizers and Pseudo-Inverse Tying for PyTorch."""
