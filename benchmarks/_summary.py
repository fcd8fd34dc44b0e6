"""The first table of docs/benchmarks.md: for each hot path, our time divided by the usual alternative's."""

from collections.abc import Iterable, Sequence
from typing import Any

from experiments.comparison import markdown_table

# (benchmark, work, contender and its name on the page, peer and its name on the page), in the page's order.
HOT_PATHS = (
    ("riemannian_step", "optimizer step of an orthonormal matrix", "ours", "`RiemannianAdam`", "geoopt", "geoopt"),
    ("riemannian_step", "", "ours", "the same", "POGO", "POGO"),
    ("riemannian_step", "", "ours", "the same", "floor", "floor"),
    ("riemannian_step", "", "ours, project_every=8", "with `project_every=8`", "floor", "floor"),
    ("riemannian_step", "", "ours, medium", 'at float32 precision "medium"', "floor", "floor"),
    ("riemannian_step", "", "ours, medium", "the same", "geoopt, medium", "geoopt at the same"),
    (
        "riemannian_step", "", "our Muon", "`RiemannianMuon`",
        "Emerging-Optimizers Spel, highest", "Spel with float32 products",
    ),
    ("maps", "weight made orthonormal", "ours cayley", '`orthogonal(map="cayley")`', "torch cayley", "PyTorch's `cayley`"),
    ("maps", "", "ours polar", "`orthogonal`, polar", "torch cayley", "PyTorch's `cayley`"),
    (
        "interface", "lookup and loss", "transpose", "transpose tying",
        "transpose, F.cross_entropy on full logits", "`F.cross_entropy` on full logits",
    ),
    (
        "interface", "", "transpose", "the same",
        "transpose, torch linear_cross_entropy", "`F.linear_cross_entropy`",
    ),
    ("interface", "", "transpose", "the same", "transpose, Liger", "Liger"),
    ("interface", "", "pit-frozen", "PIT, frozen memory", "transpose", "our transpose tying"),
    ("interface", "", "pit-trainable", "PIT, trainable memory", "transpose", "our transpose tying"),
    ("interface", "", "pit-free", "PIT, free table", "transpose", "our transpose tying"),
    ("training_step", "training step", "transpose", "transpose tying", "transformers", "Hugging Face's Llama"),
    ("training_step", "", "pit-frozen", "PIT, frozen memory", "transpose", "our transpose tying"),
    ("training_step", "", "pit-trainable", "PIT, trainable memory", "transpose", "our transpose tying"),
    ("training_step", "", "pit-free", "PIT, free table", "transpose", "our transpose tying"),
    ("training_step", "", "pit-free", "the same", "pit-trainable", "PIT, trainable memory"),
    ("equivalence", "POET layer", "ours block, exact Cayley", "block", "nn.Linear", "`nn.Linear`"),
    ("equivalence", "", "ours block", "block, two terms", "nn.Linear", "`nn.Linear`"),
    ("equivalence", "", "ours block, CUDA graph", "the same, as CUDA graphs", "nn.Linear, CUDA graph", "`nn.Linear`"),
    ("equivalence", "", "ours block", "block, two terms", "official POET", "POET's official code"),
    ("equivalence", "", "ours full 1/2", "full 1/2, two terms", "nn.Linear", "`nn.Linear`"),
    ("equivalence", "", "ours block, P alone", "block, P alone, two terms", "PEFT OFT (P alone)", "PEFT's OFT"),
    ("adapters", "finetuning step", "PoetConfig, one side", "`PoetConfig`, one side", "OFT", "PEFT's OFT"),
    ("poet_step", "POET training step", "poet-block 256", "block, b = 256", "adamw", "AdamW"),
    ("poet_step", "", "poet-block 256, two terms", "the same, two terms", "adamw", "AdamW"),
    ("poet_step", "", "poet-block 256, two terms, compiled", "the same, compiled", "adamw, compiled", "AdamW, compiled"),
    ("poet_step", "", "poet-block 256, two terms", "block, two terms", "official POET", "POET's official code"),
    ("poet_step", "", "poet-block 64", "block, b = 64", "adamw", "AdamW"),
    ("poet_step", "", "poet-full 1/2", "full 1/2", "adamw", "AdamW"),
    (
        "constraints", "doubly stochastic batch", "ours, compiled", "`linalg.sinkhorn`, compiled",
        "20 rounds, compiled", "20 rounds of Sinkhorn, compiled",
    ),
    ("constraints", "constrained layer or step", "ours", "`low_rank`, `sphere`", "plain", "`nn.Linear`, AdamW"),
)  # fmt: skip
ORDER = tuple(dict.fromkeys(path[0] for path in HOT_PATHS))

INTRODUCTION = """## In short

Our time divided by the usual alternative's (below 1: we are faster), from the smallest to the largest ratio over the measured
sizes. The number of sizes is in brackets. **Bold**: we are slower at one size or more. Each hot path has a page with memory and
accuracy.
"""

WORDS = """## Terms

- N: tokens in a step. V × d: vocabulary and hidden size. b: block size of R and P.
- floor: four matrix products and PyTorch's default Adam. We can be faster: our step uses the fused Adam kernel, computes 5/8 of
  the symmetric product, and works on blocks of rows. "floor (fused Adam)" uses that kernel, too.
- medium: `torch.set_float32_matmul_precision("medium")`. The products that project the gradient use TF32 on a GPU and bfloat16
  on a CPU with AMX; the point and its Gram matrix stay float32.
- block: POET's scheme `block`. full 1/2: scheme `full`, one block of half the dimensions. P alone: only the inputs are rotated,
  as in orthogonal finetuning (OFT). By activations, by weight: the two ways to compute the layer.
- extra MB: the largest memory during a step beyond what it began with, buffers included that are freed before the backward.
- 3 terms: of the Neumann series that PEFT's OFT takes by default; `PoetConfig` by default is the exact Cayley map.
- CUDA graph: the kernels alone, replayed without the host that launches them one by one.
- plain: the preset as a plain Llama (sequential blocks, no gate, RMSNorm), the only variant in Hugging Face's code.
"""


def summary(results: Sequence[dict[str, Any]]) -> str:
    """The introduction and the table, with a column for each processor and dtype."""
    places = sorted({place(result) for result in results}, key=lambda found: (found[0], found[1] != "float32"))
    body = []
    for benchmark, what, ours, name, peer, peer_name in HOT_PATHS:
        rows: dict[tuple[str, str], list[dict[str, Any]]] = {found: [] for found in places}
        for result in results:
            if result["benchmark"] == benchmark:
                rows[place(result)] += result["rows"]
        cells = [_span(_ratios(rows[found], ours, peer)) for found in places]
        if what or any(cells):
            body.append([what, name, peer_name, *cells])
    on_gpu = any(result["machine"]["device"] != "cpu" for result in results)
    note = [] if on_gpu else ["\nNo GPU has been measured."]
    head = ["", "ours", "instead of", *(", ".join(found) for found in places)]
    return "\n".join([INTRODUCTION, markdown_table(head, body, left=len(head)), *note, ""])


def place(result: dict[str, Any]) -> tuple[str, str]:
    """Processor or GPU, and dtype."""
    machine = result["machine"]
    return machine["processor"] if machine["device"] == "cpu" else machine["device"], result["dtype"]


def _ratios(rows: Iterable[dict[str, Any]], ours: str, peer: str) -> list[float]:
    """The contender's time divided by the peer's, for rows that have both."""
    found = ([row["contenders"].get(name, {}).get("ratio") for name in (ours, peer)] for row in rows)
    return [mine / theirs for mine, theirs in found if mine is not None and theirs is not None]


def _span(ratios: list[float]) -> str:
    if not ratios:
        return ""
    least, most = (f"{ratio:.2f}" if ratio >= 0.1 else f"{ratio:.2g}" for ratio in (min(ratios), max(ratios)))
    span = least if len(ratios) == 1 else f"{least} to {most}"
    return f"**{span}** ({len(ratios)})" if float(most) > 1 else f"{span} ({len(ratios)})"
