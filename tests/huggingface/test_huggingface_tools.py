"""What people run on a converted model: generation, Trainer, checkpointing, compilation, PEFT, resizing, offloading."""

import copy
from pathlib import Path
from typing import Any, cast

import peft
import pytest
import torch
from accelerate import cpu_offload
from huggingface_models import (
    D,
    Repeated,
    V,
    arguments,
    build,
    difference,
    ids,
    interface,
    logits,
    optimizer_for,
    turned,
)
from transformers import AutoModelForCausalLM, Trainer
from transformers.pytorch_utils import Conv1D

import manifold_tying as mt
from manifold_tying.linalg import defect
from manifold_tying.optim import RiemannianAdam, param_groups

# transformers 5.23 renames what PEFT 0.21 and everybody's scripts call
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning"),
]


@pytest.mark.parametrize("family", ["Llama", "GPT-2"])
def test_generation_with_and_without_cache(family: str) -> None:
    model = mt.convert(build(family), bridge=True)
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    cached = model.generate(ids(), **options)
    assert torch.equal(cached, model.generate(ids(), use_cache=False, **options))
    assert torch.equal(cached, build(family).generate(ids(), **options))


def test_trainer_trains_on_the_manifold_saves_and_resumes(tmp_path: Path) -> None:
    def run(resume: str | None = None) -> Any:
        model = mt.convert(build(), bridge=True, memory="trainable").train()
        optimizers = (optimizer_for(model), cast(Any, None))
        trainer = Trainer(model, arguments(tmp_path, 10), train_dataset=Repeated(), optimizers=optimizers)
        trainer.train(resume_from_checkpoint=resume)
        return model.eval()

    start = build()(ids(4, 12), labels=ids(4, 12)).loss
    model = run()
    pit = interface(model)
    assert model(ids(4, 12), labels=ids(4, 12)).loss < start - 0.3
    assert defect(pit.memory) <= 1e-6
    assert difference(pit.memory, interface(mt.convert(build())).memory) > 1e-3
    assert torch.equal(logits(mt.load(tmp_path / "checkpoint-10")), logits(model))
    assert difference(logits(run(str(tmp_path / "checkpoint-5"))), logits(model)) <= 1e-5


def test_trainers_own_adamw_trains_a_free_table_as_ours_does(tmp_path: Path) -> None:
    """Without an optimizer, a callback or a warning of ours."""
    trained = []
    for ours in (False, True):
        torch.manual_seed(0)
        model: Any = mt.convert(build()).train()
        settings = arguments(tmp_path / str(ours), 6)
        optimizers: Any = (None, None)
        if ours:
            optimizer = RiemannianAdam(param_groups(model), lr=settings.learning_rate, fused=True)
            optimizers = optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / 6))
        Trainer(model, settings, train_dataset=Repeated(), optimizers=optimizers).train()
        E, W_out = interface(model).materialize()
        assert torch.dist(W_out @ E, torch.eye(D)) <= 1e-4
        trained.append(logits(model.eval()))
    assert torch.equal(*trained)


def test_an_optimizer_that_leaves_the_manifold_is_found_out(tmp_path: Path) -> None:
    model = mt.convert(build(), memory="trainable")
    with pytest.warns(UserWarning, match="AdamW moved ManifoldPIT.memory"):
        Trainer(model, arguments(tmp_path, 5), train_dataset=Repeated()).train()
    with pytest.raises(ValueError, match="leaves the manifold"):
        mt.save(model, tmp_path / "saved")
    with pytest.raises(ValueError, match="leaves the manifold"):
        mt.load(tmp_path / "checkpoint-5")
    assert not (tmp_path / "saved").exists()
    interface(model).memory = interface(model).memory.detach()
    mt.save(model, tmp_path / "saved")
    assert defect(interface(mt.load(tmp_path / "saved")).memory) <= 1e-6


def test_gradient_checkpointing() -> None:
    gradients = []
    for reentrant in (None, False, True):
        model = mt.convert(build(), bridge=True, memory="trainable").train()
        if reentrant is not None:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        model(ids(), labels=ids()).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert any("memory" in name for name in gradients[0])
    for found in gradients[1:]:
        torch.testing.assert_close(found, gradients[0])


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiled_in_one_graph() -> None:
    model = mt.convert(build(num_hidden_layers=1), bridge=True, memory="trainable").train()
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
    model = mt.convert(build(), bridge=True)
    before = logits(model)
    offloaded = cpu_offload(copy.deepcopy(model), execution_device=torch.device("cpu"))
    assert interface(offloaded).bridge.is_meta
    assert torch.equal(logits(offloaded), before)
    with pytest.raises(ValueError, match="offloaded"):
        mt.export(offloaded, tmp_path)


def adapted(model: Any, **options: Any) -> Any:
    return peft.get_peft_model(model, peft.LoraConfig(r=4, task_type="CAUSAL_LM", **options))


def test_lora_on_the_body_trains_merges_saves_and_exports(tmp_path: Path) -> None:
    model = mt.convert(build(), bridge=True)
    before = logits(model)
    lora = adapted(model, target_modules="all-linear")
    assert not any("interface" in name for name, p in lora.named_parameters() if p.requires_grad)
    optimizer = torch.optim.AdamW([p for p in lora.parameters() if p.requires_grad], lr=3e-2)
    for _ in range(5):
        lora(ids(), labels=ids()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    lora.eval()
    after = logits(lora)
    assert difference(after, before) > 1e-3
    lora.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(mt.convert(build(), bridge=True), tmp_path / "adapter").eval()
    assert difference(logits(again), after) <= 1e-5
    merged = lora.merge_and_unload()
    assert difference(logits(merged), after) <= 1e-5
    mt.save(merged, tmp_path / "saved")
    assert torch.equal(logits(mt.load(tmp_path / "saved")), logits(merged))
    mt.export(merged, tmp_path / "exported")
    assert difference(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "exported")), after) <= 1e-5


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"target_modules": ["embed_tokens"]}, "not supported"),
        ({"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}, "one half"),
    ],
)
def test_adapters_on_the_interface_are_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        adapted(mt.convert(build()), **options)


@pytest.mark.parametrize(("size", "bridge"), [(V + 9, True), (V - 9, False)])
def test_resizing_keeps_the_memory_orthonormal_and_says_what_moved(size: int, bridge: bool, tmp_path: Path) -> None:
    model = turned(mt.convert(build("Phi"), bridge=bridge, memory="trainable"))
    old, T, bias = interface(model), interface(model).transform.detach(), model.get_output_embeddings().bias.detach()
    kept = min(V, size)
    with pytest.warns(UserWarning, match=f"{V} -> {size}") as caught:
        embedding = model.resize_token_embeddings(size)
    new = interface(model)
    assert embedding is model.get_input_embeddings() and new is model.get_output_embeddings().interface
    assert new.memory.shape == (size, D) and defect(new.memory) <= 1e-6 and torch.equal(new.transform, T)
    assert model.config.vocab_size == size and logits(model, ids() % size).shape[-1] == size
    assert torch.equal(model.get_output_embeddings().bias[:kept], bias[:kept])
    assert not model.get_output_embeddings().bias[kept:].any()
    tokens = torch.arange(kept)
    moved = (new.embed(tokens) - old.embed(tokens)).detach().norm() / old.embed(tokens).detach().norm()
    assert f"{float(moved):.1e}" in str(caught[0].message)
    assert any(p.requires_grad for name, p in new.named_parameters() if "memory" in name)
    # the nearest orthonormal matrix to the rows that were cut or appended
    rows = old.memory[:size] if size < V else torch.cat([old.memory, old.memory.mean(0).expand(size - V, -1)])
    U, _, Wt = torch.linalg.svd(rows.detach().double(), full_matrices=False)
    torch.testing.assert_close(new.memory.double(), U @ Wt, atol=1e-6, rtol=0)
    mt.save(model, tmp_path)
    assert torch.equal(logits(mt.load(tmp_path), ids() % size), logits(model, ids() % size))


@pytest.mark.parametrize("size", [V + 9, V - 9])
def test_resizing_a_free_table_keeps_the_logits(size: int, tmp_path: Path) -> None:
    model = mt.convert(build("Phi"))
    old, kept, hidden = interface(model), torch.arange(min(V, size)), torch.randn(3, D)
    with pytest.warns(UserWarning, match="Logits and the body did not change") as caught:
        model.resize_token_embeddings(size)
    new = interface(model)
    assert torch.equal(new.head_weight[kept], old.head_weight[kept]) and new.vocab_size == size
    # products with another number of columns may be added up in another order
    torch.testing.assert_close(new.logits(hidden)[:, kept], old.logits(hidden)[:, kept], rtol=0, atol=1e-5)
    moved = (new.embed(kept) - old.embed(kept)).norm() / old.embed(kept).norm()
    assert f"{float(moved.detach()):.1e}" in str(caught[0].message)
    mt.save(model, tmp_path)
    assert torch.equal(logits(mt.load(tmp_path), ids() % size), logits(model, ids() % size))


def test_resizing_corner_cases() -> None:
    model = mt.convert(build(), memory="frozen")
    assert model.resize_token_embeddings() is model.get_input_embeddings()  # a warning would be an error
    assert model.resize_token_embeddings(V) is model.get_input_embeddings()
    with pytest.raises(ValueError, match="V >= d"):
        model.resize_token_embeddings(D - 1)
    with pytest.warns(UserWarning, match=f"{V} -> 128"):
        model.resize_token_embeddings(V + 1, pad_to_multiple_of=32, mean_resizing=False)
    new = interface(model).memory[V:]
    assert torch.linalg.matrix_rank(new) == D  # rows of their own, where the mean would be one row
    assert copy.deepcopy(model).resize_token_embeddings(128).num_embeddings == 128
    padded = mt.convert(build(), memory="frozen")
    interface(padded).memory = torch.cat([torch.zeros(V - D, D), torch.eye(D)])
    with pytest.raises(ValueError, match="span"):
        padded.resize_token_embeddings(V - D)
    assert interface(padded).vocab_size == V == padded.config.vocab_size


def test_equivalence_on_gpt2_names_the_layers_that_it_does_not_take() -> None:
    model = mt.convert(build("GPT-2"), bridge=True)
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
