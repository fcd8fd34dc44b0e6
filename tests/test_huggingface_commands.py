"""manifold-tying convert | export | inspect, on folders."""

import io
from pathlib import Path

import pytest
import torch
from huggingface_models import build, difference, logits
from rich.console import Console
from transformers import AutoModelForCausalLM

import manifold_tying as mt
from manifold_tying.training._huggingface import (
    ConvertConfig,
    ExportConfig,
    InspectConfig,
    interface_numbers,
    run_convert,
    run_export,
    run_inspect,
)


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=200)


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.fixture
def stock(tmp_path: Path) -> Path:
    build().save_pretrained(tmp_path / "stock")
    (tmp_path / "stock" / "tokenizer.json").write_text("{}")
    return tmp_path / "stock"


def test_convert_export_and_inspect(stock: Path, console: Console, tmp_path: Path) -> None:
    run_convert(ConvertConfig(stock, tmp_path / "converted", bridge=True, memory="trainable"), console)
    run_export(ExportConfig(tmp_path / "converted", tmp_path / "exported"), console)
    before = logits(AutoModelForCausalLM.from_pretrained(stock))
    assert difference(logits(mt.load(tmp_path / "converted")), before) <= 1e-5
    assert difference(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "exported")), before) <= 1e-5
    for folder in ("converted", "exported"):
        assert (tmp_path / folder / "tokenizer.json").read_text() == "{}"
        assert len(list((tmp_path / folder).glob("*.safetensors"))) == 1
    for name, kind in (
        ("stock", "tied: one table"),
        ("converted", "PIT with a bridge"),
        ("exported", "equal tables, not tied"),
    ):
        run_inspect(InspectConfig(tmp_path / name), console)
        assert kind in printed(console)


def test_what_inspect_shows() -> None:
    stock = interface_numbers(build())
    assert stock["V x d"] == "96 x 16" and 5 < float(stock["cond(E)"]) < 50
    assert interface_numbers(build(tie_word_embeddings=False))["token interface"].startswith("untied")
    plain = interface_numbers(mt.convert(build()))
    assert plain["token interface"] == "PIT" and float(plain["defect of Z"]) < 1e-6
    assert float(plain["cond(T)"]) == pytest.approx(float(stock["cond(E)"]), rel=2e-2)  # T = H
    assert float(plain["ΔTI = ‖W_out E - I‖"]) < 1e-4
    bridged = interface_numbers(mt.convert(build(), bridge=True))
    table = build().get_input_embeddings().weight.detach().double()
    expected = torch.linalg.matrix_norm(table.T @ table - torch.eye(16)).item()
    assert float(bridged["ΔTI = ‖W_out E - I‖"]) == pytest.approx(expected, rel=1e-2)  # what the bridge gives up


def test_wrong_folders_are_refused(stock: Path, console: Console, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json"):
        run_inspect(InspectConfig(tmp_path), console)
    with pytest.raises(ValueError, match="another folder"):
        run_convert(ConvertConfig(stock, stock), console)
    with pytest.raises(ValueError, match="no converted model"):
        run_export(ExportConfig(stock, tmp_path / "out"), console)
    assert not (tmp_path / "out").exists()
