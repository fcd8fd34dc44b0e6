"""Time and extra memory of a step of finetuning with adapters of PEFT.

    python -m benchmarks.adapters --rounds 40

A step is forward, loss, backward and AdamW of a Llama of 4 layers whose linear layers have adapters. OFT and ours rotate the
input side in blocks of b; "3 terms" is the series that OFT has by default. The reference is OFT.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import tyro

from benchmarks._command import Options, run
from benchmarks._harness import Contender, Row, Step
from benchmarks._peers import load

TITLE = "A step of finetuning with adapters"
SIZES = ((128, 32, 384), (512, 32, 384))
QUICK_SIZES = ((16, 4, 32),)


def _row(d: int, b: int, N: int, options: Options) -> Row:
    """Steps with adapters; a sequence has 16 tokens."""
    shape = {"hidden_size": d, "intermediate_size": 11 * d // 4, "num_hidden_layers": 4, "num_attention_heads": 4}
    ids = torch.randint(4096, (N // 16, 16), generator=torch.Generator().manual_seed(0)).to(options.device)

    def build(method: str, **adapter: Any) -> Step:
        peft, ours = load("peft", "peft"), load("manifold_tying.peft", "peft")
        with torch.random.fork_rng(), torch.device(options.device):
            torch.manual_seed(0)
            base = load("transformers", "transformers")
            model = base.LlamaForCausalLM(base.LlamaConfig(vocab_size=4096, **shape))
            config = getattr(ours if method == "PoetConfig" else peft, method)
            model = peft.get_peft_model(model, config(**adapter, target_modules="all-linear"))
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)

        def step() -> None:
            with options.autocast():
                loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    reference = "OFT"
    contenders = [
        Contender(reference, partial(build, "OFTConfig", r=0, oft_block_size=b)),
        Contender("PoetConfig, one side", partial(build, "PoetConfig", block_size=b, sides="in")),
        Contender(
            "PoetConfig, one side, 3 terms",
            partial(build, "PoetConfig", block_size=b, sides="in", map="series", terms=3),
        ),
        Contender("LoRA, r 8", partial(build, "LoraConfig", r=8)),
    ]
    return Row(f"d={d} b={b} N={N}", reference, contenders)


def rows(options: Options) -> Iterator[Row]:
    """A row for each size."""
    return (_row(*size, options) for size in (QUICK_SIZES if options.quick else SIZES))


def main(arguments: Sequence[str] | None = None) -> None:
    options = tyro.cli(Options, description=__doc__, args=arguments)
    run("adapters", TITLE, rows(options), options, arguments, memory=True)


if __name__ == "__main__":
    main()
