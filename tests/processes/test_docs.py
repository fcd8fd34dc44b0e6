"""The examples of README and docs run as they stand."""

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from huggingface_models import build
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch.distributed.tensor import DTensor
from transformers import PreTrainedTokenizerFast

import manifold_tying as mt
from manifold_tying.models import PRESETS
from manifold_tying.testing import check_manifold
from manifold_tying.training import TrainConfig, resolve
from manifold_tying.training.build import build_model
from manifold_tying.training.saving import stage_checkpoint, write_checkpoint
from manifold_tying.training.sections import Interface

ROOT = Path(__file__).resolve().parents[2]
TEXT = repr(f"text:{ROOT / 'tests/unit/training'}")  # a corpus


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a page writes to the current folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def one_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pages say the same of a shallower model."""
    monkeypatch.setitem(PRESETS, "nano", dataclasses.replace(PRESETS["nano"], num_layers=1))


def program(page: str) -> str:
    """The Python blocks of a page, one after the other."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return "".join(re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL))


def run_page(page: str, code: str) -> dict[str, Any]:
    """What the names of a page stand for in the end."""
    names: dict[str, Any] = {}
    exec(compile(code, page, "exec"), names)
    return names


def save_run(run: Path, interface: Interface, seed: int = 0, steps: tuple[int, ...] = (180,)) -> None:
    """What an ablation leaves, but for the training."""
    config = resolve(TrainConfig(out=run, interface=interface, seed=seed))
    model = build_model(config)
    for step in steps:
        staged = stage_checkpoint(step, model, torch.optim.SGD(model.parameters()), config.as_json())
        write_checkpoint(run, staged, keep=None)


def test_diagnostics_run_after_an_ablation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arms: tuple[Interface, ...] = ("untied", "transpose", "pit-frozen", "pit-trainable")
    for arm in arms:
        save_run(tmp_path / "runs/ablation" / f"{arm}-0", arm)
    save_run(tmp_path / "runs/ablation/transpose-1", "transpose", seed=1)
    for arm in ("transpose", "pit-trainable"):
        save_run(tmp_path / "runs/course" / f"{arm}-0", arm, steps=(36, 72))
    page = program("docs/diagnostics.md")
    assert page.count('prepare("stdlib"') == 1  # a smaller corpus does here: some of the tests
    assert page.count("held_out.split(32)") == 1
    page = page.replace('"stdlib"', TEXT).replace("held_out.split(32)", "held_out[:128].split(32)")
    names = run_page("docs/diagnostics.md", page)
    assert names["consistency"]["pit-trainable"].delta_ti < 1e-4 < names["consistency"]["transpose"].delta_ti
    assert [path.name for path in names["course"]["transpose"]] == ["step-00000036", "step-00000072"]
    assert (tmp_path / "traces.png").read_bytes().startswith(b"\x89PNG")


def test_readme_runs() -> None:
    names = run_page("README.md", program("README.md"))
    E, W_out = names["E"], names["W_out"]
    assert torch.allclose(W_out @ E, torch.eye(512), atol=1e-4)
    assert type(names["layer"]) is torch.nn.Linear  # materialized


@pytest.mark.parametrize("page", ["docs/index.md", "docs/optimizers.md"])
def test_short_pages_run(page: str) -> None:
    assert run_page(page, program(page))["optimizer"].state


def test_hyper_connections_train_and_mix_by_doubly_stochastic_matrices() -> None:
    names = run_page("docs/tutorials/hyper-connections.md", program("docs/tutorials/hyper-connections.md"))
    mix, losses = names["mix"], names["losses"]
    assert losses[0] > 2 and losses[-1] < 0.3
    assert mix.shape == (256, 4, 4) and mix.std(0).max() > 1e-3  # they differ from token to token
    for dim in (-2, -1):
        torch.testing.assert_close(mix.sum(dim), torch.ones(256, 4), rtol=0, atol=1e-6)


@pytest.mark.usefixtures("one_layer")
def test_learning_rates_has_the_recipe_of_a_trainable_memory() -> None:
    names = run_page("docs/learning-rates.md", program("docs/learning-rates.md"))
    config = resolve(TrainConfig(out=Path("unused"), interface="pit-trainable"))
    model: Any = build_model(config)
    assert names["model"].config == model.config and str(names["model"].interface) == str(model.interface)
    assert names["optimizer"].defaults["betas"] == config.settings.betas


def save_checkpoint(folder: Path) -> None:
    """A tiny tied Llama of transformers with a tokenizer."""
    build().save_pretrained(folder)
    words = Tokenizer(WordLevel({"?": 0, "a": 1, "b": 2}, unk_token="?"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?").save_pretrained(folder)


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator:UserWarning")
# transformers 5.23 renames what PEFT 0.21 calls
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_huggingface_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_checkpoint(tmp_path / "CHECKPOINT")
    page = program("docs/huggingface.md").replace("HuggingFaceTB/SmolLM3-3B-Base", "CHECKPOINT")
    page = page.replace("(16, 128)", "(16, 32)")
    names = run_page("docs/huggingface.md", page)
    shown = capsys.readouterr().out
    assert "'source'" in shown and "'rotation'" in shown and (tmp_path / "exported").is_dir()
    E, W_out = mt.diagnostics.interface_tables(names["model"])
    assert mt.diagnostics.delta_ti(E, W_out) <= 1e-4


def test_continued_pretraining_runs(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "CHECKPOINT")
    names = run_page("docs/continued-pretraining.md", program("docs/continued-pretraining.md"))
    assert len(names["optimizer"].param_groups) > 2


@pytest.fixture
def one_process() -> Iterator[None]:
    """A group of this process alone, in place of torchrun's."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:`broadcast_buffers` is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view:UserWarning")  # nothing writes to it
def test_scaling_out_runs(one_process: None) -> None:
    page = program("docs/scaling-out.md")
    assert page.count('"cuda"') == page.count("(8,)") == 1
    names = run_page("docs/scaling-out.md", page.replace('"cuda"', '"cpu"').replace("(8,)", "(1,)"))
    memory = names["model"].interface.parametrizations.memory.original
    assert isinstance(memory, DTensor) and memory.placements[0].is_shard(0)


@pytest.mark.usefixtures("one_layer")
def test_poet_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = run_page("docs/poet.md", program("docs/poet.md"))
    assert len(names["taken"]) == 7 and (tmp_path / "adapter/adapter_config.json").exists()
    assert "orthogonal equivalence on 7 linear layers" in capsys.readouterr().out


@pytest.mark.usefixtures("one_layer")
def test_the_page_on_pit_runs_and_has_the_recipe_of_the_command() -> None:
    names = run_page("docs/pit.md", program("docs/pit.md").replace("32000", "3200"))
    E, W_out, Z, T = (names[name].detach().double() for name in ("E", "W_out", "Z", "T"))
    assert torch.dist(W_out @ E, torch.eye(512)) < 1e-4 and torch.dist(Z @ T, W_out.mT) < 1e-4
    config = resolve(TrainConfig(out=Path("unused"), interface="pit-free"))
    model = build_model(config)
    assert names["model"].config == model.config and names["model"].interface.std == model.interface.std
    assert names["optimizer"].defaults["betas"] == config.settings.betas


def test_the_tutorial_on_layers_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = program("docs/tutorials/constrain-a-layer.md").replace("30, 600, 1e-2", "2, 100, 1e-2")
    names = run_page("docs/tutorials/constrain-a-layer.md", page)
    assert names["curves"]["constrained"][-1] < 1.0 < names["curves"]["constrained"][0]
    assert mt.linalg.defect(names["models"]["constrained"].rnn.weight_hh_l0) < 1e-6
    assert (tmp_path / "constrain-a-layer.svg").exists()
    assert names["seen"] < 1e-3 and names["optimizer"].state
    check_manifold(names["Centered"](), (16,), order=2)


def test_the_tutorial_on_convolutions_runs(tmp_path: Path) -> None:
    page = program("docs/tutorials/orthogonal-convolutions.md").replace("15, 3, (1e-3, 3e-3, 1e-2)", "2, 2, (3e-3,)")
    names = run_page("docs/tutorials/orthogonal-convolutions.md", page)
    accuracy = {kind: clean.mean().item() for (kind, _), (clean, _) in names["accuracies"].items()}
    assert accuracy["plain"] < 0.5 < accuracy["constrained"]
    layers = [layer for layer in names["models"]["constrained", 3e-3] if hasattr(layer, "weight")]
    assert len(layers) == 12
    for layer in layers:
        values = torch.linalg.svdvals(layer.weight.flatten(1))
        assert torch.allclose(values, torch.ones_like(values), atol=1e-5)
    assert (tmp_path / "orthogonal-convolutions.svg").exists()


def test_the_tutorial_on_a_gpt_runs(tmp_path: Path) -> None:
    page = program("docs/tutorials/pit-in-your-gpt.md").replace('"stdlib"', TEXT)
    page = page.replace("400, 16, 128", "24, 4, 32").replace("V, d = 2048, 128", "V, d = 512, 32")
    names = run_page("docs/tutorials/pit-in-your-gpt.md", page)
    assert names["pit_curve"][-1] < names["pit_curve"][0]
    assert torch.dist(names["W_out"] @ names["E"], torch.eye(32)) < 1e-4
    assert (tmp_path / "pit-in-your-gpt.svg").exists()


def test_the_tutorial_on_poet_runs(tmp_path: Path) -> None:
    page = program("docs/tutorials/poet.md").replace('"stdlib"', TEXT)
    page = page.replace("300, 2048, 64", "24, 512, 64").replace("every=100", "every=8").replace("range(16)", "range(2)")
    names = run_page("docs/tutorials/poet.md", page)
    assert names["moved"] < 1e-5 and type(names["poet"].blocks[0].mlp.up) is torch.nn.Linear
    assert not torch.allclose(names["plain_before"], names["plain_after"], rtol=1e-3)
    assert (tmp_path / "poet.svg").exists()


def test_the_tutorial_on_ablations_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_run(tmp_path / "runs/notes/pit-free-0", "pit-free")
    run_page("docs/tutorials/ablation.md", program("docs/tutorials/ablation.md"))
    assert capsys.readouterr().out.startswith("pit-free-0 ")
    save_run(tmp_path / "runs/pit", "pit-free")
    run_page("docs/resume.md", program("docs/resume.md"))
    assert capsys.readouterr().out.startswith("runs/pit/checkpoints/step-00000180 ")


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator:UserWarning")
def test_the_tutorial_on_transformers_runs(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "CHECKPOINT")
    page = program("docs/tutorials/transformers.md").replace("HuggingFaceTB/SmolLM2-135M", "CHECKPOINT")
    names = run_page("docs/tutorials/transformers.md", page)
    ids = names["rows"][:2, :8]
    with torch.no_grad():
        assert torch.allclose(names["stock"](ids).logits, names["again"](ids).logits, atol=1e-4)


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator:UserWarning")
@pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning")
@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec:FutureWarning")  # of torch, in Lightning
def test_the_page_on_frameworks_runs() -> None:
    names = run_page("docs/frameworks.md", program("docs/frameworks.md"))
    plain, trained = names["build"](), names["model"].body
    assert mt.linalg.defect(trained[0].weight) < 1e-6 and not torch.equal(trained[0].weight, plain[0].weight)


def test_the_page_on_your_own_loop_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = run_page("docs/your-own-loop.md", program("docs/your-own-loop.md"))
    assert (
        capsys.readouterr().out.split() == ["True"] * 4
    )  # resumed bit for bit; off the manifold; exported as plain layers
    assert names["merges"].steps == 12 and mt.linalg.defect(names["model"].up.weight) < 1e-6
    averaged = names["averaged"]
    assert mt.linalg.defect(averaged.up.weight) < 1e-6
    E, W_out = averaged.interface.materialize()
    assert torch.dist(W_out @ E, torch.eye(32)) < 1e-4


def test_quoted_messages_are_those_of_the_package() -> None:
    sources = (path.read_text(encoding="utf-8") for path in (ROOT / "manifold_tying").rglob("*.py"))
    said = re.sub(r'"\s+f?"', "", "\n".join(sources))  # literals that stand on several lines
    page = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    quoted = re.findall(r"^\*\*(\".+\")\*\*$", page, flags=re.MULTILINE)
    parts = [part.strip(' "') for quote in quoted for part in re.split(r'…|"\*\* and \*\*"', quote)]
    assert len(quoted) > 15 and [part for part in parts if part and part not in said] == []


def test_sentences_are_short() -> None:
    """At most 22 words on average on every page; code, tables and headings left out."""
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        prose = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith(("|", "#", "!", ":::")))
        paragraphs = re.split(r"\n\s*\n|\n\s*(?=[-*] )", re.sub(r"\]\([^)]*\)", "]", prose))
        sentences = [s for p in paragraphs for s in re.split(r"(?<=[.!?:])\s+", " ".join(p.split()))]
        words = [count for s in sentences if (count := len(re.findall(r"\S*\w\S*", s))) > 2]
        assert sum(words) <= 22 * len(words), (page.name, sum(words) / len(words))


@pytest.mark.usefixtures("without_shrinking", "few_examples")
def test_testing_runs(capsys: pytest.CaptureFixture[str]) -> None:
    names = run_page("docs/testing.md", program("docs/testing.md"))
    assert "retr lands on the manifold" in capsys.readouterr().out
    atoms, codes, signals = names["atoms"], names["codes"], names["signals"]
    assert (atoms.norm(dim=0) - 1).abs().max() < 1e-5
    assert (signals - codes @ atoms.T).square().mean() < 0.1 * signals.square().mean()
