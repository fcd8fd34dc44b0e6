"""What other libraries read from a converted model: the head's weight (TRL, Mamba), the embedding's rows (PEFT), a map."""

import copy
from pathlib import Path
from typing import Any, get_args

import peft
import pytest
import torch
import torch.nn.functional as F
import transformers
from accelerate import infer_auto_device_map
from huggingface_models import D, V, build, difference, ids, logits, make, round_trip, turned
from safetensors.torch import load_file, save_file
from torch import Tensor

import manifold_tying as mt
from manifold_tying.huggingface import halves, modules

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


class Chunked(torch.autograd.Function):
    """As TRL's and Liger's losses: the head's weight goes straight into a Function, which writes its gradient itself."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        return torch.cat([part @ weight.t() for part in hidden.split(3)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        hidden, weight = ctx.saved_tensors
        return grads[0] @ weight, grads[0].t() @ hidden


@pytest.mark.parametrize(("product", "bridge"), [(F.linear, False), (Chunked.apply, True)])
def test_hidden_states_by_the_weight_are_logits_with_all_gradients(product: Any, bridge: bool) -> None:
    model = turned(mt.convert(build(), bridge=bridge, memory="trainable"))
    head, pit = model.get_output_embeddings(), halves(model)[0].interface
    hidden, out = torch.randn(7, D), torch.randn(7, V)
    found = []
    for compute in (lambda h: head(h), lambda h: product(h, head.weight)):
        h = hidden.clone().requires_grad_()
        result = compute(h)
        (result * out).sum().backward()
        gradients = {name: p.grad for name, p in pit.named_parameters()}
        assert len(gradients) == 3 if bridge else 2
        found.append([result.detach(), h.grad, *gradients.values()])
        pit.zero_grad()
    for left, right in zip(*found, strict=True):
        assert difference(right, left) <= 1e-5
    assert difference(head.weight.detach(), pit.materialize()[1].T) <= 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_weight_has_the_dtype_of_the_model_and_costs_nothing_until_it_is_used(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, compute = [], modules._compute

    def counted(*given: Any) -> Tensor:
        calls.append(given)
        return compute(*given)

    monkeypatch.setattr(modules, "_compute", counted)
    model = mt.convert(build(), memory="trainable").to(dtype)
    weight = model.get_output_embeddings().weight
    assert weight.dtype == dtype and weight.shape == (V, D) and weight.requires_grad and not calls
    assert weight.sum().dtype == dtype and weight.sum().isfinite() and len(calls) == 1  # once for both
    with torch.no_grad():
        assert not model.get_output_embeddings().weight.requires_grad
    assert copy.deepcopy(model).get_output_embeddings().weight.shape == (V, D)


def test_a_backward_after_a_step_is_refused() -> None:
    model = mt.convert(build(), memory="trainable")
    weight = model.get_output_embeddings().weight
    loss = weight.square().sum()
    with torch.no_grad():
        next(halves(model)[0].interface.parameters()).mul_(1)
    with pytest.raises(RuntimeError, match="inplace operation"):
        loss.backward()


def test_funnel_is_saved_loaded_and_exported(tmp_path: Path) -> None:
    settings = {
        "vocab_size": V, "d_model": D, "n_head": 2, "d_head": 8, "d_inner": D, "block_sizes": [1, 1], "num_decoder_layers": 1
    }  # fmt: skip
    round_trip(mt.convert(make("FunnelForMaskedLM", "FunnelConfig", settings), bridge=True), tmp_path)


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad:UserWarning")
@pytest.mark.parametrize("kind", [peft.PromptTuningConfig, peft.PrefixTuningConfig])
def test_prompt_methods_train_save_and_load(kind: Any, tmp_path: Path) -> None:
    tuned = peft.get_peft_model(mt.convert(build(), bridge=True), kind(task_type="CAUSAL_LM", num_virtual_tokens=2))
    tuned.eval()
    assert tuned.word_embeddings is halves(tuned.get_base_model())[0]
    before = logits(tuned)
    tuned(input_ids=ids(), labels=ids()).loss.backward()
    with torch.no_grad():
        for p in tuned.parameters():
            if p.requires_grad:
                p.sub_(p.grad.sign() * 0.5)
    after = logits(tuned)
    assert difference(after, before) > 1e-4
    tuned.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(mt.convert(build(), bridge=True), tmp_path).eval()
    assert difference(logits(again), after) <= 1e-5


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
@pytest.mark.filterwarnings("ignore:Unsupported layer type:UserWarning")
@pytest.mark.parametrize("memory", get_args(mt.tying.Memory))
def test_trainable_token_indices_are_refused_when_they_are_put_on(memory: Any) -> None:
    config = peft.LoraConfig(target_modules=["q_proj"], trainable_token_indices=[3], task_type="CAUSAL_LM")
    with pytest.raises(ValueError, match="one half of a tied pair: training single tokens"):
        peft.get_peft_model(mt.convert(build(), memory=memory), config)


def test_a_tight_device_map_splits_neither_half(tmp_path: Path) -> None:
    model = mt.convert(build(), bridge=True, memory="trainable")
    mt.save(model, tmp_path / "saved")
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    for share in range(1, 10):
        room = {"cpu": size * share // 10, "disk": 10 * size}
        places = infer_auto_device_map(model, room, no_split_module_classes=list(model._no_split_modules))
        assert not any("interface" in name for name in places), places
    placed: dict[str, Any] = {"device_map": "auto", "max_memory": room, "offload_folder": tmp_path}  # nine tenths
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", **placed)
    assert torch.equal(logits(loaded), logits(model))


def test_a_checkpoint_of_the_first_format_loads_and_is_saved_in_the_second(tmp_path: Path) -> None:
    model = turned(mt.convert(build(), bridge=True, memory="frozen"))
    mt.save(model, tmp_path)
    file, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    tensors = load_file(file)
    assert tensors["model.embed_tokens.weight"].shape == (V, 0)
    tensors["model.embed_tokens.weight"] = torch.empty(0)
    save_file(tensors, file, metadata={"format": "pt"})
    config.write_text(config.read_text().replace('"format": 2', '"format": 1'))
    loaded: Any = mt.load(tmp_path)
    assert torch.equal(logits(loaded), logits(model)) and loaded.get_input_embeddings().weight.shape == (V, 0)
    loaded.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(mt.load(tmp_path / "again")), logits(model))
