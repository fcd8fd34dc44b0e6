"""The words of the page, explained. Written here and not data, so markup is allowed."""

WORDS = (
    (
        "validation loss",
        "Mean cross-entropy on held-out text, in nats per token. 0.01 nats less is one percent less perplexity.",
    ),
    (
        "memory <i>Z</i>",
        "The token table that embedding and unembedding share: one row per token, orthonormal columns. It is "
        "<em>frozen</em> where training leaves it alone, <em>trainable</em> where training moves it.",
    ),
    (
        "transform <i>T</i>",
        "A symmetric positive definite map of hidden space. Pseudo-Inverse Tying embeds with "
        "<i>E</i> = <i>Z</i> <i>T</i><sup>−1</sup> and unembeds with "
        "<i>W</i><sub>out</sub> = <i>T</i> <i>Z</i><sup>⊤</sup>.",
    ),
    (
        "defect",
        "‖<i>Z</i><sup>⊤</sup><i>Z</i> − <i>I</i>‖<sub>F</sub> / √<i>d</i>: how far the columns of the memory are from "
        "orthonormal.",
    ),
    (
        "ΔTI",
        "‖<i>W</i><sub>out</sub> <i>E</i> − <i>I</i>‖<sub>F</sub>: how far the unembedding is from an inverse of the "
        "embedding.",
    ),
    ("cond(<i>T</i>)", "The largest eigenvalue of the transform over its smallest."),
    (
        "POET, <i>R</i> and <i>P</i>",
        "A body whose matrices are <i>W</i> = <i>R</i> <i>W</i><sub>0</sub> <i>P</i>: <i>W</i><sub>0</sub> stays as it was "
        "drawn, the orthogonal <i>R</i> and <i>P</i> are trained and every so many steps merged into it. In scheme "
        "<em>block</em> every dimension rotates, in scheme <em>full</em> some, others after each merge.",
    ),
    (
        "e_orth",
        "‖<i>R</i> <i>R</i><sup>⊤</sup> − <i>I</i>‖<sub>F</sub> / √<i>m</i>, the largest over the rotations of the model "
        "since the last evaluation: how far they are from orthogonal.",
    ),
    (
        "Δ to transpose, to adamw",
        "The arm’s validation loss minus that of transpose tying, seed by seed, then averaged. Negative is better. Without "
        "transpose tying in the experiment, minus that of the body trained by AdamW.",
    ),
    (
        "spread between seeds",
        "The sample standard deviation of the differences, seed by seed. A mean difference no larger than that is "
        "called within the spread. This is a reading aid and not a significance test.",
    ),
)
