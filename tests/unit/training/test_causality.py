"""Next-token training of a model that sees its targets is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hostile import run
from transformers import BertConfig, BertLMHeadModel

from manifold_tying.cli import main
from manifold_tying.training import load_model
from manifold_tying.training.data import open_tokens, prepare

V = 300


def source(folder: Path, corpus: Path, **options: Any) -> Path:
    shape = BertConfig(
        vocab_size=V, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, pad_token_id=None,
        max_position_embeddings=64, **options,
    )  # fmt: skip
    torch.manual_seed(0)
    BertLMHeadModel(shape).save_pretrained(folder)
    made = open_tokens(prepare(f"text:{corpus}", vocab_size=V))
    (folder / "tokenizer.json").write_bytes((made.directory / "tokenizer.json").read_bytes())
    return folder


def command(out: Path, corpus: Path, checkpoint: Path, *more: str) -> list[str]:
    return [
        "train", "--init-from", str(checkpoint), "--data", f"text:{corpus}", "--steps", "1", "--batch-size", "2",
        "--sequence-length", "16", "--val-tokens", "32", "--out", str(out), *more,
    ]  # fmt: skip


def test_a_bidirectional_checkpoint_is_refused(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = source(tmp_path / "bert", corpus, is_decoder=False)
    status, said = run(command(tmp_path / "out", corpus, checkpoint, "--interface", "pit-frozen"), capsys)
    assert status == 2 and f"but {checkpoint} looks at later tokens" in said and "is_decoder" in said
    assert not (tmp_path / "out").exists()


def test_the_same_checkpoint_as_a_decoder_is_trained(tmp_path: Path, corpus: Path) -> None:
    checkpoint = source(tmp_path / "bert", corpus, is_decoder=True)
    main(command(tmp_path / "out", corpus, checkpoint, "--interface", "transpose"))
    assert isinstance(load_model(tmp_path / "out"), BertLMHeadModel)
