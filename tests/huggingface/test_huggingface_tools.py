"""What people run on a converted model: generation, Trainer, checkpointing, compilation, PEFT, resizing, offloading."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from huggingface_models import D, Repeated, V, arguments, build, difference, ids, interface, logits, turned
from transformers import Trainer
from transformers.pytorch_utils import Conv1D

import manifold_tying as mt

# transformers 5.23 renames what PEFT 0.21 and everybody's scripts call
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning"),
]


@pytest.mark.parametrize("family", ["Llama", "GPT-2"])
def test_generation_with_and_without_cache(family: str) -> None:
    model = turned(mt.convert(build(family)))
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    cached = model.generate(ids(), **options)
    assert torch.equal(cached, model.generate(ids(), use_cache=False, **options))
    assert not torch.equal(cached, build(family).generate(ids(), **options))  # the control: another function


def test_trainer_trains_saves_resumes_and_loads_the_best(tmp_path: Path) -> None:
    def run(resume: str | None = None) -> Any:
        model = mt.convert(build()).train()
        options = arguments(tmp_path, 10)
        options.eval_strategy, options.eval_steps, options.load_best_model_at_end = "steps", 5, True
        options.metric_for_best_model, options.greater_is_better = "eval_loss", False
        trainer = Trainer(model, options, train_dataset=Repeated(), eval_dataset=Repeated())
        trainer.train(resume_from_checkpoint=resume)
        assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-10")
        return model.eval()

    start = build()(ids(4, 12), labels=ids(4, 12)).loss
    model = run()
    assert model(ids(4, 12), labels=ids(4, 12)).loss < start - 0.3
    E, W_out = interface(model).materialize()
    torch.testing.assert_close(W_out @ E, torch.eye(D), rtol=0, atol=1e-4)
    assert torch.equal(logits(mt.load(tmp_path / "checkpoint-10")), logits(model))
    assert difference(logits(run(str(tmp_path / "checkpoint-5"))), logits(model)) <= 1e-5


def test_gradient_checkpointing() -> None:
    gradients = []
    for reentrant in (None, False, True):
        model = mt.convert(build()).train()
        if reentrant is not None:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        model(ids(), labels=ids()).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    for found in gradients[1:]:
        torch.testing.assert_close(found, gradients[0])


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiled_in_one_graph() -> None:
    model = mt.convert(build(num_hidden_layers=1)).train()
    loss = model(ids(), labels=ids()).loss
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)(ids(), labels=ids()).loss
    compiled.backward()
    torch.testing.assert_close(compiled, loss)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, gradients[name])


def test_offloaded_models_compute_the_same(tmp_path: Path) -> None:
    model = turned(mt.convert(build()))
    before = logits(model)
    offloaded = cpu_offload(copy.deepcopy(model), execution_device=torch.device("cpu"))
    assert offloaded.lm_head.weight.is_meta
    assert torch.equal(logits(offloaded), before)
    with pytest.raises(ValueError, match="offloaded"):
        mt.export(offloaded, tmp_path)


@pytest.mark.parametrize("size", [V + 9, V - 9])
def test_resizing_keeps_the_rows_and_says_what_moved(size: int, tmp_path: Path) -> None:
    model = turned(mt.convert(build("Phi")))
    old, kept, hidden = interface(copy.deepcopy(model)), torch.arange(min(V, size)), torch.randn(3, D)
    scored = model.get_output_embeddings()(hidden)
    with pytest.warns(UserWarning, match=f"{V} -> {size}.*every output") as caught:
        assert model.resize_token_embeddings(size) is model.get_input_embeddings()
    new = interface(model)
    assert torch.equal(new.table[kept], old.table[kept]) and len(new.table) == size == model.config.vocab_size
    torch.testing.assert_close(model.get_output_embeddings()(hidden)[:, kept], scored[:, kept], rtol=0, atol=1e-5)
    moved = (new.embed(kept) - old.embed(kept)).norm() / old.embed(kept).norm()
    assert f"{float(moved.detach()):.1e}" in str(caught[0].message)
    mt.save(model, tmp_path)
    assert torch.equal(logits(mt.load(tmp_path), ids() % size), logits(model, ids() % size))


def test_resizing_corner_cases() -> None:
    model = mt.convert(build())
    model.get_input_embeddings().weight.requires_grad_(False)
    assert model.resize_token_embeddings() is model.get_input_embeddings()  # a warning would be an error
    assert model.resize_token_embeddings(V) is model.get_input_embeddings()
    with pytest.raises(ValueError, match="at least d = 16"):
        model.resize_token_embeddings(D - 1)
    with pytest.warns(UserWarning, match=f"{V} -> 128"):
        model.resize_token_embeddings(V + 1, pad_to_multiple_of=32, mean_resizing=False)
    assert interface(model) and not model.lm_head.weight.requires_grad
    with torch.no_grad():
        model.lm_head.weight[: V - D] = 0
    with pytest.raises(ValueError, match="full column rank"):
        model.resize_token_embeddings(V - D)
    assert len(model.lm_head.weight) == 128 == model.config.vocab_size


def test_equivalence_on_gpt2_names_the_layers_that_it_does_not_take() -> None:
    model = mt.convert(build("GPT-2"))
    before = logits(model)
    with pytest.raises(ValueError, match=r"Conv1D"):
        mt.equivalence_(model, block_size=8)
    for module in model.modules():
        if isinstance(module, Conv1D):
            mt.equivalence(module, block_size=8)
    assert difference(logits(model), before) <= 1e-5
    model.train()(ids(), labels=ids()).loss.backward()
    conv = model.transformer.h[0].attn.c_attn
    assert conv.parametrizations.weight.original.grad.any()
    singular = torch.linalg.svdvals(conv.weight.detach())
    with torch.no_grad():
        conv.parametrizations.weight.original.normal_(0, 0.02)
    torch.testing.assert_close(torch.linalg.svdvals(conv.weight.detach()), singular, rtol=1e-3, atol=1e-5)
    assert difference(logits(model), before) > 1e-4
