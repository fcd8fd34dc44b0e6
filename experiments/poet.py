"""POET's comparisons: Tables 2, 5, 6 and 7, and Figure 5."""

from collections.abc import Sequence
from pathlib import Path

from experiments.comparison import Arm, Table, Trained, loss_table, size, train_arms
from manifold_tying.models import preset
from manifold_tying.training.config import Settings
from manifold_tying.training.progress import Started

FULL = "poet-full"  # with fraction 1/2, as in all of the paper's ablations
BUDGETS = (("small", 8), ("medium", 4), ("large", 3))  # h: at an even split each side rotates 1/h of its dimensions
SHARES = (0.5, 1.0, 0.9, 0.75, 0.25, 0.1, 0.0)  # R's shares of the parameters
SIXTY = "paper: perplexity (Llama-60M, 30B tokens)"


def pretraining(out: Path, settings: Settings, seeds: int, started: Started | None) -> list[Table]:
    """Table 2. Block sizes scale with the width as in the paper: 1/8, 1/4 and 1/2 of Llama-60M's 512."""
    d = preset(settings.preset).hidden_size
    blocks = [
        Arm(
            label=f"POET-BS, b = d/{part} = {max(2, d // part)}",
            spec=f"poet-block+block_size={max(2, d // part)}",
            printed=ppl,
        )
        for part, ppl in ((8, 29.52), (4, 26.90), (2, 25.29))
    ]
    full = [
        Arm(label=f"POET-FS, b = 1/{part}", spec=f"{FULL}+fraction={1 / part}", printed=ppl)
        for part, ppl in ((8, 34.06), (4, 28.69), (2, 25.37))
    ]
    others = [Arm(label="GaLore", spec=None, printed=29.81), Arm(label="LoRA, r = 64", spec=None, printed=39.70)]
    arms = [Arm(label="AdamW", spec="adamw", printed=26.68), *others, *blocks, *full]
    notes = [*_size(settings, d), "GaLore and LoRA from scratch are not part of this library."]
    trained = train_arms(out, arms, settings, seeds, started)
    return [loss_table("POET, Table 2: pretraining", trained, SIXTY, notes)]


def initialization(out: Path, settings: Settings, seeds: int, started: Started | None) -> list[Table]:
    """Table 5."""
    names = {"normalized": 25.37, "xavier": 25.79, "standard": 26.22, "uniform-spectrum": 27.29}
    arms = [Arm(label=name, spec=f"{FULL}+init={name}", printed=ppl) for name, ppl in names.items()]
    return [_ablation("POET, Table 5: what W0 is drawn from", out, arms, settings, seeds, started)]


def merging(out: Path, settings: Settings, seeds: int, started: Started | None) -> list[Table]:
    """Table 6, for each T_m below the number of steps. The smallest other T_m stands for never merging."""
    printed = {400: 25.31, 5: 30.29, 25: 27.27, 50: 25.99, 200: 25.37, 1600: 25.58}
    never = min((every for every in printed if every >= settings.steps), default=None)
    arms = [
        Arm(
            label=f"T_m = {every}" + (", never merged here" if every == never else ""),
            spec=f"{FULL}+merge_every={every}" if every < settings.steps or every == never else None,
            printed=ppl,
        )
        for every, ppl in sorted(printed.items(), key=lambda item: item[0] != never)
    ]
    notes = [f"A run has {settings.steps} steps here; the paper's have hundreds of thousands, so 400 of them are few."]
    return [_ablation("POET, Table 6: steps between merges", out, arms, settings, seeds, started, notes)]


def terms(out: Path, settings: Settings, seeds: int, started: Started | None) -> list[Table]:
    """Table 7, plus five terms, six terms and the exact map."""
    printed = {2: 21.54, 1: 22.56, 3: 20.22, 4: 20.19, 5: None, 6: None}
    arms = [Arm(label=f"k = {k}", spec=f"{FULL}+cayley_terms={k}", printed=ppl) for k, ppl in printed.items()]
    arms += [Arm(label="exact Cayley map", spec=f"{FULL}+cayley_terms=null"), Arm(label="k = 0", spec=None)]
    notes = ["k = 0 (R = I + A, which the paper reports as not converged) is refused by this library."]
    trained = train_arms(out, arms, settings, seeds, started)
    column = "paper: perplexity (Llama-130M)"
    losses = loss_table("POET, Table 7: terms of the Neumann series", trained, column, [*_of_runs(settings), *notes])
    return [losses, _errors(trained)]


def budget(out: Path, settings: Settings, seeds: int, started: Started | None) -> list[Table]:
    """Figure 5: a fixed number of parameters, split between R and P."""
    tables = []
    for name, h in BUDGETS:
        title = f"POET, Figure 5: a {name} budget, h = {h}, split between R and P"
        notes = ["The paper's figure has no numbers to copy; it says that the even split is best."]
        tables.append(_ablation(title, out / name, budget_arms(h), settings, seeds, started, notes))
    return tables


def budget_arms(h: int) -> list[Arm]:
    """One arm for each split."""
    return [
        Arm(label=f"R : P = {share:g} : {1 - share:g}", spec=f"{FULL}+fraction={1 / h!r}+out_share={share}")
        for share in SHARES
    ]


def _ablation(
    title: str, out: Path, arms: Sequence[Arm], settings: Settings, seeds: int, started: Started | None,
    notes: Sequence[str] = (),
) -> Table:  # fmt: skip
    trained = train_arms(out, arms, settings, seeds, started)
    return loss_table(title, trained, SIXTY, [*_of_runs(settings), *notes])


def _errors(trained: Trained) -> Table:
    """Orthogonality errors as in Figure 10, at the end of the runs."""
    body = []
    for arm in trained.arms:
        values = list(trained.values(arm, "orthogonality_error").values())
        if values:
            body.append([arm.label, f"{max(values):.1e}"])
    notes = ["Of all R and P at the last evaluation, the largest over seeds; k even has ‖A‖^(2k+2), k odd 2‖A‖^(k+1)."]
    head = ["arm", "e_orth = ‖RRᵀ - I‖ / ‖I‖"]
    return Table(title="POET, Figure 10: orthogonality error", head=head, body=body, notes=notes)


def _of_runs(settings: Settings) -> list[str]:
    return [f"{size(settings)}; the paper: C4. Learning rates are the recipe's, not tuned per arm."]


def _size(settings: Settings, d: int) -> list[str]:
    return [*_of_runs(settings), f"The paper's b = 64, 128 and 256 are d/8, d/4 and d/2 of d = 512; here d = {d}."]
