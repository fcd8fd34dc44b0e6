"""Orthogonal equivalence in the Trainer of transformers: merges, resumption, and that stock models load what it saves."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_models import Repeated, arguments, build, difference, logits
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback

import manifold_tying as mt
from manifold_tying.poet import equivalences


def rotating(**options: Any) -> Any:
    model = build()
    mt.equivalence_(model, block_size=4, seed=3, verbose=False, **options)
    return model


class Norms(TrainerCallback):
    """Notes the norm that every step clips to."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_step_begin(self, args: Any, *_: Any, **parts: Any) -> None:
        self.seen.append(args.max_grad_norm)


class Interrupt(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, *_: Any, **parts: Any) -> None:
        if state.global_step == 5:
            raise KeyboardInterrupt


def trained(out: Path, resume: str | None = None, steps: int = 10) -> tuple[Any, list[float], Trainer]:
    model, norms = rotating(terms=None), Norms()
    callbacks = [mt.optim.MergeCallback(every=4, clip_ramp_steps=2), norms]
    trainer = Trainer(model.train(), arguments(out, steps), train_dataset=Repeated(), callbacks=callbacks)
    trainer.train(resume_from_checkpoint=resume)
    return model.eval(), norms.seen, trainer


def test_trainer_merges_clips_and_resumes(tmp_path: Path) -> None:
    whole, norms, trainer = trained(tmp_path)
    assert norms == pytest.approx([1, 1, 1, 1, 0.1, 0.55, 1, 1, 0.1, 0.55]) and trainer.args.max_grad_norm == 1
    assert {int(part.merges) for _, part, _ in equivalences(whole)} == {2}
    assert difference(logits(whole), logits(build())) > 1e-2
    resumed, later, _ = trained(tmp_path, str(tmp_path / "checkpoint-5"))
    assert later == pytest.approx(norms[5:])
    assert difference(logits(resumed), logits(whole)) <= 1e-5
    for (_, a, _), (_, b, _) in zip(equivalences(whole), equivalences(resumed), strict=True):
        assert int(a.merges) == int(b.merges) and torch.equal(a.in_places, b.in_places)


def test_an_interrupted_training_goes_on_with_the_users_norm(tmp_path: Path) -> None:
    norms = Norms()
    callbacks = [mt.optim.MergeCallback(every=4, clip_ramp_steps=2), norms, Interrupt()]
    trainer = Trainer(rotating(), arguments(tmp_path, 6), train_dataset=Repeated(), callbacks=callbacks)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert norms.seen[-1] == pytest.approx(0.1)
    trainer.remove_callback(Interrupt)
    trainer.train()
    assert norms.seen[5:] == pytest.approx([1, 1, 1, 1, 0.1, 0.55]) and trainer.args.max_grad_norm == 1


def test_what_the_trainer_saves_loads_as_what_it_trained(tmp_path: Path) -> None:
    model, _, trainer = trained(tmp_path, steps=5)
    trainer.save_model(str(tmp_path / "saved"))
    for folder in ("saved", "checkpoint-5"):
        stock = AutoModelForCausalLM.from_pretrained(tmp_path / folder)
        assert difference(logits(stock), logits(model)) <= 1e-5
    mt.materialize(model).save_pretrained(tmp_path / "plain")
    assert difference(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "plain")), logits(model)) <= 1e-5


def test_state_dicts_of_a_transformers_model_stay_loadable(tmp_path: Path) -> None:
    model = rotating()
    with torch.no_grad():
        for _, _, stored in equivalences(model):
            stored.add_(0.01)
    again = rotating()
    again.load_state_dict(model.state_dict())  # strict
    assert torch.equal(logits(again), logits(model)) and not torch.equal(logits(model), logits(build()))
    copied = copy.deepcopy(build())
    copied.load_state_dict({name: value for name, value in model.state_dict().items() if name in copied.state_dict()})
    assert difference(logits(copied), logits(model)) <= 1e-5
    other = copy.deepcopy(model)  # writes its own weights, not those of the model that it was copied from
    with torch.no_grad():
        for _, _, stored in equivalences(other):
            stored.zero_()
    copied.load_state_dict({name: value for name, value in other.state_dict().items() if name in copied.state_dict()})
    assert difference(logits(copied), logits(build())) <= 1e-5
    model.save_pretrained(tmp_path / "saved")
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert difference(logits(stock), logits(model)) <= 1e-5
