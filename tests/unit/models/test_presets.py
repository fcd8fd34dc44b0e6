"""The configurations: what they refuse, and the parameter counts that the papers print."""

import dataclasses
import json
import re
from typing import Any

import pytest
import torch
from training_runs import TINY

from manifold_tying import TransposeTying
from manifold_tying.cli import HELP
from manifold_tying.models import PRESETS, Llama, LlamaConfig, preset

# PIT, Table 3: L, d, n_h, n_kv, d_ff, then the printed total and the share of the embedding in it.
PIT_TABLE_3 = {
    "pit-0.3b": ((24, 1024, 16, 4, 2816), "303 M", "10.8%"),
    "pit-0.6b": ((32, 1280, 20, 5, 3584), "613 M", "6.7%"),
    "pit-1.2b": ((40, 1600, 24, 6, 4480), "1.17 B", "4.4%"),
}

# POET, Table 8: d, n_h, L. Table 2, row AdamW: the trainable parameters, which are those of the body's matrices alone.
POET_SHAPES = {"60m": (512, 8, 8), "130m": (768, 12, 12), "350m": (1024, 16, 24), "1.3b": (2048, 32, 24)}
POET_WIDTHS = {"60m": 1280, "130m": 2048, "350m": 2816, "1.3b": 5376}
GALORE_WIDTHS = {"60m": 1376, "130m": 2048, "350m": 2736, "1.3b": 5464}
POET_TABLE_2_ADAMW = {"60m": "25.30M", "130m": "84.93M", "350m": "302.38M", "1.3b": "1.21B"}

SIZES: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
SIZES |= {"intermediate_size": 48}


def meta_model(config: LlamaConfig) -> Llama:
    """The model without its memory: a billion parameters cost nothing on the meta device."""
    with torch.device("meta"):
        return Llama(config, TransposeTying(config.vocab_size, config.hidden_size))


def in_billions(count: int, digits: int = 2, space: str = "") -> str:
    return f"{count / 1e9:.2f}{space}B" if count >= 1e9 else f"{count / 1e6:.{digits}f}{space}M"


@pytest.mark.parametrize("name", PIT_TABLE_3)
def test_pit_presets_have_the_columns_and_totals_of_table_3(name: str) -> None:
    columns, printed_total, printed_share = PIT_TABLE_3[name]
    config = preset(name)
    found = config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads, config.intermediate_size
    assert found == columns and (config.vocab_size, config.norm) == (32_000, "layernorm")
    assert config.parallel_block and config.gated_attention
    count = sum(parameter.numel() for parameter in meta_model(config).parameters())
    assert in_billions(count, 0, " ") == printed_total
    assert f"{config.vocab_size * config.hidden_size / count:.1%}" == printed_share


@pytest.mark.parametrize(("family", "widths"), [("poet", POET_WIDTHS), ("galore", GALORE_WIDTHS)])
def test_poet_presets_have_the_shapes_of_table_8(family: str, widths: dict[str, int]) -> None:
    for size, (d, heads, layers) in POET_SHAPES.items():
        sizes: dict[str, Any] = {"vocab_size": 32_000, "hidden_size": d, "intermediate_size": widths[size]}
        sizes |= {"num_layers": layers, "num_heads": heads, "num_kv_heads": heads, "head_dim": 64}
        assert preset(f"{family}-{size}") == LlamaConfig(**sizes, norm="rmsnorm", norm_eps=1e-6)


def test_galore_presets_have_the_parameter_counts_of_the_adamw_row() -> None:
    for size, printed in POET_TABLE_2_ADAMW.items():
        body = meta_model(preset(f"galore-{size}")).blocks
        assert in_billions(sum(p.numel() for p in body.parameters() if p.ndim == 2)) == printed


def test_presets_survive_json() -> None:
    for name in PRESETS:
        config = preset(name)
        again = LlamaConfig(**json.loads(json.dumps(dataclasses.asdict(config))))
        assert again == config != dataclasses.replace(again, num_layers=config.num_layers + 1)


def test_the_help_of_the_command_lists_the_names() -> None:
    assert set(re.findall(r"[a-z]+-[\d.]+[bm]|bytes|nano|mini", HELP)) == set(PRESETS) - {TINY}


def test_unknown_preset_lists_the_names() -> None:
    with pytest.raises(
        ValueError, match=r"unknown preset 'pit-7b'; choose one of bytes, nano, .*pit-0\.3b, .*galore-1\.3b"
    ):
        preset("pit-7b")


def test_head_dim_is_derived_and_free_to_differ() -> None:
    assert LlamaConfig(**SIZES).head_dim == 8
    assert LlamaConfig(**SIZES, head_dim=6).head_dim == 6
    assert LlamaConfig(**SIZES | {"num_heads": 6, "head_dim": 4}).head_dim == 4
    assert dataclasses.replace(LlamaConfig(**SIZES), hidden_size=64, head_dim=0).head_dim == 16


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 1.5}, "num_layers to be an integer >= 1, got 1.5"),
        ({"num_heads": 5, "num_kv_heads": 5}, "num_heads must divide hidden_size, got hidden_size=32, num_heads=5"),
        ({"num_kv_heads": 3}, "num_kv_heads must divide num_heads, got num_heads=4, num_kv_heads=3"),
        ({"num_heads": 32}, "head_dim must be even, got 1.*change num_heads or give an even head_dim"),
        ({"head_dim": -2}, r"head_dim to be an integer >= 0 \(0: derived\), got -2"),
        ({"norm": "batchnorm"}, "unknown norm 'batchnorm'; choose one of rmsnorm, layernorm"),
        ({"rope_theta": 0.0}, r"rope_theta must be positive, got 0\.0"),
        ({"norm_eps": -1e-5}, "norm_eps must be positive, got -1e-05"),
        ({"initializer_std": 0}, "initializer_std must be positive, got 0"),
    ],
)
def test_configs_that_cannot_be_built_say_why(changes: dict[str, Any], message: str) -> None:
    LlamaConfig(**SIZES)
    with pytest.raises(ValueError, match=message):
        LlamaConfig(**SIZES | changes)
