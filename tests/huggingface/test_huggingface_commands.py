"""manifold-tying convert | export | inspect, on folders."""

import io
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hostile import run
from huggingface_models import _BERT, BIASED, MULTIMODAL, build, difference, logits, make
from rich.console import Console
from transformers import AutoModelForCausalLM

import manifold_tying as mt
from manifold_tying.cli import main
from manifold_tying.diagnostics import svd_entropy
from manifold_tying.training.commands import (
    ConvertConfig,
    ExportConfig,
    InspectConfig,
    interface_numbers,
    run_convert,
    run_export,
    run_inspect,
)

CLASSES: dict[str, tuple[str, dict[str, Any]]] = {
    "BertForMaskedLM": BIASED["BertForMaskedLM"],
    "Gemma3ForConditionalGeneration": MULTIMODAL["Gemma3ForConditionalGeneration"],
    "DebertaV2ForMaskedLM": ("DebertaV2Config", _BERT),
    "ModernBertForMaskedLM": ("ModernBertConfig", {**_BERT, "cls_token_id": 1, "sep_token_id": 2}),
}


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=200)


@pytest.fixture
def stock(tmp_path: Path) -> Path:
    build().save_pretrained(tmp_path / "stock")
    (tmp_path / "stock" / "tokenizer.json").write_text("{}")
    return tmp_path / "stock"


def test_convert_export_and_inspect(
    stock: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    converted, exported = str(tmp_path / "converted"), str(tmp_path / "exported")
    main(["convert", str(stock), converted, "--transform", "rotation"])
    main(["export", converted, exported])
    before = logits(AutoModelForCausalLM.from_pretrained(stock))
    assert difference(logits(mt.load(converted)), before) <= 1e-4
    assert difference(logits(AutoModelForCausalLM.from_pretrained(exported)), before) <= 1e-4
    for folder in ("converted", "exported"):
        assert (tmp_path / folder / "tokenizer.json").read_text() == "{}"
        assert len(list((tmp_path / folder).glob("*.safetensors"))) == 1
    for name, kind in (
        ("stock", "llama, tied"),
        ("converted", "llama, PIT"),
        ("exported", "llama, untied"),
    ):
        capsys.readouterr()
        main(["inspect", str(tmp_path / name)])
        shown = capsys.readouterr().out
        assert kind in shown and "anchor_procrustes_error" in shown


def test_what_inspect_shows(tmp_path: Path) -> None:
    def numbers(model: Any, name: str) -> dict[str, str]:
        model.save_pretrained(tmp_path / name)
        return {label: value for label, value, _ in interface_numbers(tmp_path / name)[0]}

    stock = numbers(build(), "stock")
    assert stock["V x d"] == "96 x 16" and 5 < float(stock["cond(E)"]) < 50
    assert "untied" in numbers(build(tie_word_embeddings=False), "untied")["token interface"]
    plain = numbers(mt.convert(build()), "plain")
    assert plain["token interface"].endswith("PIT") and float(plain["defect"]) < 1e-6
    assert float(plain["cond(T)"]) == pytest.approx(float(stock["cond(E)"]), rel=2e-2)  # T = H
    E = build().get_input_embeddings().weight.detach()
    assert float(stock["effective rank"].split(", ")[0]) == pytest.approx(16 ** svd_entropy(E).item(), abs=0.06)
    assert float(plain["effective rank"].split(", ")[1]) == pytest.approx(16 ** svd_entropy(E).item(), abs=0.06)
    assert float(plain["delta_ti"]) < 1e-4 and float(plain["principal_angle"]) < 1e-6


def test_chat_templates_in_a_folder_come_along(stock: Path, console: Console, tmp_path: Path) -> None:
    (stock / "additional_chat_templates").mkdir()
    (stock / "additional_chat_templates" / "tool_use.jinja").write_text("{{ messages }}")
    run_convert(ConvertConfig(stock, tmp_path / "converted"), console)
    run_export(ExportConfig(tmp_path / "converted", tmp_path / "exported"), console)
    for folder in ("converted", "exported"):
        assert (tmp_path / folder / "additional_chat_templates" / "tool_use.jinja").read_text() == "{{ messages }}"


def test_wrong_folders_are_refused(stock: Path, console: Console, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json"):
        run_inspect(InspectConfig(tmp_path), console)
    with pytest.raises(ValueError, match="another folder"):
        run_convert(ConvertConfig(stock, stock), console)
    with pytest.raises(ValueError, match="not a converted model"):
        run_export(ExportConfig(stock, tmp_path / "out"), console)
    assert not (tmp_path / "out").exists()
    shutil.copytree(stock, tmp_path / "other")
    with pytest.raises(ValueError, match="other already holds a model that is not converted"):
        run_convert(ConvertConfig(stock, tmp_path / "other"), console)


@pytest.mark.filterwarnings("ignore:gemma3:UserWarning")
@pytest.mark.parametrize("kind", CLASSES)
def test_every_part_of_the_class_that_was_saved_is_kept(kind: str, console: Console, tmp_path: Path) -> None:
    before = make(kind, *CLASSES[kind])
    before.save_pretrained(tmp_path / "stock")
    run_convert(ConvertConfig(tmp_path / "stock", tmp_path / "converted", transform="embedding"), console)
    run_export(ExportConfig(tmp_path / "converted", tmp_path / "exported"), console)
    run_inspect(InspectConfig(tmp_path / "stock"), console)
    assert type(mt.load(tmp_path / "converted")).__name__ == kind
    exported, report = type(before).from_pretrained(tmp_path / "exported", output_loading_info=True)
    assert not any(report.values()), report
    state = exported.state_dict()
    assert state.keys() == before.state_dict().keys()
    head = before.get_output_embeddings()
    heads = {f"{name}.weight" for name, module in before.named_modules(remove_duplicate=False) if module is head}
    for name in state.keys() - heads:  # the embedding too
        torch.testing.assert_close(state[name], before.state_dict()[name], rtol=1e-4, atol=1e-5)


def test_no_readme_of_a_user_is_lost(stock: Path, console: Console, tmp_path: Path) -> None:
    (stock / "README.md").write_text("the model's card")
    out = tmp_path / "converted"
    run_convert(ConvertConfig(stock, out), console)
    assert (out / "README.md").read_text() == "the model's card"
    (out / "README.md").write_text("the user's own")
    run_convert(ConvertConfig(stock, out), console)
    assert (out / "README.md").read_text() == "the user's own"


def test_an_earlier_export_is_not_overwritten(stock: Path, console: Console, tmp_path: Path) -> None:
    run_convert(ConvertConfig(stock, tmp_path / "converted"), console)
    run_export(ExportConfig(tmp_path / "converted", tmp_path / "exported"), console)
    with pytest.raises(ValueError, match=r"exported already holds a model \(config.json, model.safetensors\)"):
        run_export(ExportConfig(tmp_path / "converted", tmp_path / "exported"), console)


def test_a_run_without_a_checkpoint_is_said_to_be_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "config.json").write_text("{}")
    for command in (["export", str(tmp_path), str(tmp_path / "out")], ["inspect", str(tmp_path)]):
        status, said = run(command, capsys)
        assert status == 2 and "holds a run without a checkpoint; resume it with train --resume" in said
