"""Operation counts of docs/scaling.md; a product of (a, b) and (b, c) counts 2abc."""


def floor(V: int, d: int) -> float:
    """Four products of X (V, d) with a square or a tall matrix."""
    return 8.0 * V * d**2


def riemannian_step(V: int, d: int, project_every: int = 1) -> float:
    """XᵀG and X S at every ``project_every``-th step; 5/8 of YᵀY, Y P and four products for P at every step."""
    return 2.0 * V * d**2 * (2 / project_every + 5 / 8 + 1) + 8.0 * d**3


def loss(V: int, d: int, N: int, frozen: bool = False) -> float:
    """Logits and the gradients of hidden states and, unless frozen, of the table."""
    return (4.0 if frozen else 6.0) * N * V * d


def transform(d: int, N: int, n: int, frozen: bool = False) -> float:
    """Operations that PIT adds for N tokens, n of them distinct: T = L Lᵀ, h T, z T⁻¹, and their gradients."""
    readout = 6.0 * N * d**2 + 4.0 * d**3
    lookup = (4.0 if frozen else 6.0) * n * d**2 + 4.0 * d**3
    return readout + lookup
