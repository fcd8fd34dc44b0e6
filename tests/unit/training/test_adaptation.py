"""Word problems, exact match by greedy decoding, and a small model adapted to the problems by LoRA."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_models import build
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM

import manifold_tying as mt
from experiments.adaptation import PROBLEMS, RUN, adaptation
from experiments.problems import (
    HELD_OUT_EVERY,
    IN_DOMAIN,
    OUT_OF_DOMAIN,
    Kind,
    Problem,
    exact_match,
    problems,
)
from manifold_tying.training.data.tokenize import SEPARATOR, separator_id, train_tokenizer
from manifold_tying.training.sections import Interface

V = 320
KINDS: tuple[Kind, ...] = ("training", "in-domain", "out-of-domain")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer((q + a for q, a in problems(400, 3, "training")), V)


# --- the problems


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_the_arithmetic_of_the_words(kind: Kind) -> None:
    less = re.compile("without|remove|but not")
    for question, answer in problems(600, 5, kind):
        numbers = sorted(int(n) for n in re.findall(r"\d+", question))
        assert answer == f" {numbers[1] + (-1 if less.search(question) else 1) * numbers[0]}" and question[-1] == "?"


def test_no_problem_is_of_two_kinds_whatever_the_seed() -> None:
    assert problems(50, 1, "training") == problems(80, 1, "training")[:50] != problems(50, 2, "training")
    per_kind = {kind: {q for seed in (0, 1) for q, _ in problems(600, seed, kind)} for kind in KINDS}
    assert not per_kind["training"] & per_kind["in-domain"] and not per_kind["training"] & per_kind["out-of-domain"]
    every = [q for kind in KINDS[:2] for q, _ in problems(_count(kind), 0, kind)]
    assert len(set(every)) == len(every)
    assert _count("in-domain") == pytest.approx(len(every) / HELD_OUT_EVERY, rel=0.05)
    wordings = {re.sub(r"\d+", "0", w) for _, w in IN_DOMAIN} & {re.sub(r"\d+", "0", w) for _, w in OUT_OF_DOMAIN}
    assert not wordings


def _count(kind: Kind) -> int:
    with pytest.raises(ValueError) as error:
        problems(1 << 30, 0, kind)
    return int(re.findall(r"<= (\d+)", str(error.value))[0])


# --- exact match


def slow_answer(model: Any, tokenizer: Tokenizer, question: str, most: int) -> str | None:
    """Greedy decoding of one question by whole forward passes, without a cache; None where it does not end."""
    end = separator_id(tokenizer, "the tokenizer")
    ids: list[int] = [end, *tokenizer.encode(question).ids]
    start = len(ids)
    for _ in range(most):
        with torch.no_grad():
            ids = [*ids, int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax())]
        if ids[-1] == end:
            return tokenizer.decode(ids[start:-1])
    return None


@pytest.mark.parametrize("interface", ["stock", "converted"])
def test_decoding_agrees_with_whole_forward_passes(interface: str, tokenizer: Tokenizer) -> None:
    """On a random model that says numbers, and ends where its hidden state says so, after questions of several lengths."""
    model = build(vocab_size=V, pad_token_id=None)
    if interface == "converted":
        mt.convert(model)
    with torch.no_grad():
        for parameter in model.model.layers.parameters():
            parameter.mul_(8)  # what it says depends on what it was asked
    model.generation_config.repetition_penalty = 3.0  # a checkpoint's own wishes are not to count
    numbers = [tokenizer.encode(f" {n}").ids for n in range(3, 10)]
    assert all(len(ids) == 1 for ids in numbers)
    silent = torch.ones(V, dtype=torch.bool).index_fill(0, torch.tensor(numbers).flatten(), False)

    def only_numbers(_: Any, inputs: tuple[Tensor, ...], scores: Tensor) -> Tensor:
        scores = scores.masked_fill(silent, -1e9)
        scores[..., tokenizer.token_to_id(SEPARATOR)] = inputs[0][..., 0].sign() * 1e9
        return scores

    model.get_output_embeddings().register_forward_hook(only_numbers)
    asked = [question for question, _ in problems(40, 0, "training")]
    said = [(question, slow_answer(model, tokenizer, question, most=6)) for question in asked]
    ended = [(question, answer) for question, answer in said if answer]
    assert len(ended) >= 10 and len({answer for _, answer in ended}) >= 5
    assert len({len(tokenizer.encode(question).ids) for question, _ in ended}) >= 3
    assert exact_match(model, tokenizer, ended) == 1.0
    some_wrong = [(q, a if i % 4 else f"{a} 3") for i, (q, a) in enumerate(ended)]
    assert exact_match(model, tokenizer, some_wrong) == sum(i % 4 > 0 for i in range(len(ended))) / len(ended)


class Rigged(torch.nn.Module):
    """Says what it is told to, whatever the question: its ``generate`` is all that is asked of it."""

    def __init__(self, told: list[int]) -> None:
        super().__init__()
        self.told = told

    def generate(self, ids: Tensor, max_new_tokens: int, **_: Any) -> Tensor:
        said = torch.tensor(self.told[:max_new_tokens]).expand(len(ids), -1)
        return torch.cat([ids, said], 1)


def test_only_the_whole_answer_and_nothing_after_it_counts(tokenizer: Tokenizer) -> None:
    end = tokenizer.token_to_id(SEPARATOR)
    asked: list[Problem] = [("What is 3 and 4?", " 7"), ("And 9 less 2?", " 7")]

    def share(text: str, *, ends: bool = True, of: list[Problem] = asked) -> float:
        told = tokenizer.encode(text).ids + [end] * 9 * ends
        return exact_match(Rigged(told), tokenizer, of)  # type: ignore[arg-type]

    assert share(" 7") == 1.0
    assert share(" 7", of=[*asked, ("And 9 less 3?", " 6"), ("And 9 more 3?", " 12")]) == 0.5
    for wrong in (" 8", "7", " 7 ", " 7.", " 77", ""):
        assert share(wrong) == 0.0, wrong
    assert share(" 7 7 7", ends=False) == 0.0
    longer: list[Problem] = [*asked, ("And 70 and 7?", " 77 7 7")]
    too_long = [*tokenizer.encode(" 7 7").ids, end]
    assert exact_match(Rigged(too_long), tokenizer, longer) == 0.0  # type: ignore[arg-type]
    told = [*tokenizer.encode(" 7").ids, end, *tokenizer.encode(" 8").ids]  # what comes after the end is none of it
    assert exact_match(Rigged(told), tokenizer, longer) == pytest.approx(2 / 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="got none"):
        share(" 7", of=[])
    with pytest.raises(ValueError, match="expected a question with the same tokens alone and before its answer"):
        share(" 7", of=[("fro", "m 3")])


# --- the adaptation


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    folder = tmp_path_factory.mktemp("source")
    build(vocab_size=V, pad_token_id=None).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_adaptation_end_to_end(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = "experiments.adaptation"
    monkeypatch.setattr(f"{module}.TRAINING", 400)
    monkeypatch.setattr(f"{module}.EVALUATED", 40)
    converted = tmp_path / "converted"
    mt.save(mt.convert(AutoModelForCausalLM.from_pretrained(source), transform="rotation"), converted)
    (converted / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    options: dict[str, Any] = {"steps": 3, "seed": 1, "lora_rank": 2, "lr": 1e-2}
    options |= {"batch_size": 4, "sequence_length": 32}
    arms: list[tuple[Interface, Path]] = [("transpose", source), ("pit-trainable", converted)]
    for interface, checkpoint in arms:
        out = tmp_path / interface
        row = adaptation(checkpoint, out, interface=interface, **options)
        assert (row["interface"], row["seed"]) == (interface, 1) and row["val_loss"] < 7
        names = ("in_domain", "in_domain_before", "out_of_domain", "out_of_domain_before")
        assert all(0 <= row[name] < 0.3 for name in names)  # nothing is learned in three steps
        before, after = (load_file(f / "model.safetensors") for f in (checkpoint, out / RUN / "model"))
        assert set(before) == set(after)
        assert not torch.equal(*(t["model.layers.0.mlp.up_proj.weight"] for t in (before, after)))
        assert json.loads((out / "result.json").read_text()) == row
        lines = [json.loads(line) for line in (out / PROBLEMS).read_text().splitlines()]
        assert lines == [{"text": question + answer} for question, answer in problems(400, 0, "training")]
    # A folder with its row is read, one without is resumed.
    monkeypatch.setattr(f"{module}.exact_match", lambda *_: 2.0)
    out = tmp_path / "transpose"
    row = json.loads((out / "result.json").read_text())
    assert adaptation(source, out, interface="transpose", **options) == row
    (out / "result.json").unlink()
    stamp = (out / PROBLEMS).stat().st_mtime_ns
    again = adaptation(source, out, interface="transpose", **options)
    assert again == {name: 2.0 if "domain" in name else value for name, value in row.items()}
    assert (out / PROBLEMS).stat().st_mtime_ns == stamp
    with pytest.raises(ValueError, match=r"holds a run with another lr \(saved .*\); choose another"):
        adaptation(source, out, interface="transpose", **{**options, "lr": 2e-2})
    with pytest.raises(ValueError, match="transpose starts from a table"):
        adaptation(converted, tmp_path / "other", interface="transpose", **options)
    assert not (tmp_path / "other").exists()
