"""Adapters of ours on bases that bitsandbytes and torchao quantize, beside the same adapters on the dequantized weights."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

import manifold_tying as mt
from manifold_tying.peft import PoetConfig, StiefelLoraConfig
from manifold_tying.tying import PITEmbedding

TARGETS = ["q_proj", "v_proj", "down_proj"]
IDS = torch.tensor([[1, 5, 2, 8, 3], [0, 4, 4, 9, 7]])
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:TorchaoLoraLinear was instantiated without:UserWarning"),
    pytest.mark.filterwarnings("ignore:MatMul8bitLt. inputs will be cast:UserWarning"),
]


def tiny(tied: bool = False) -> Any:
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        tie_word_embeddings=tied,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def by_bitsandbytes(model: Any, **options: Any) -> Any:
    import bitsandbytes as bnb

    for name, module in list(model.model.named_modules()):
        if isinstance(module, nn.Linear):
            kind = bnb.nn.Linear4bit if "quant_type" in options else bnb.nn.Linear8bitLt
            new = kind(module.in_features, module.out_features, bias=False, **options)
            new.load_state_dict(module.state_dict())
            model.model.set_submodule(name, new.to("cpu"))
    return model


def by_torchao(model: Any) -> Any:
    torchao = pytest.importorskip("torchao.quantization")  # importing it asks for a GPU: not among our requirements
    torchao.quantize_(model.model, torchao.Int8WeightOnlyConfig())
    return model


QUANTIZED: dict[str, Callable[[Any], Any]] = {
    "nf4": lambda model: by_bitsandbytes(model, quant_type="nf4", compute_dtype=torch.float32),
    "int8": lambda model: by_bitsandbytes(model, has_fp16_weights=False),
    "torchao int8": by_torchao,
}
ADAPTERS: dict[str, Any] = {"poet": PoetConfig(block_size=16), "stiefel lora": StiefelLoraConfig(r=4)}


def dequantized(model: Any) -> Any:
    """A copy whose weights are the numbers that the quantized layers multiply by."""
    plain = tiny()
    for name, module in model.named_modules():
        if hasattr(module, "in_features"):
            with torch.no_grad():
                plain.get_submodule(name).weight.copy_(module(torch.eye(module.in_features)).T)
    for name in ("model.embed_tokens", "model.norm"):
        plain.get_submodule(name).load_state_dict(model.get_submodule(name).state_dict())
    return plain


def gradients(model: Any) -> dict[str, Tensor]:
    model.zero_grad()
    model(input_ids=IDS, labels=IDS).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("kind", QUANTIZED)
def test_gradients_are_those_of_the_quantized_function(kind: str, adapter: str) -> None:
    base = QUANTIZED[kind](tiny())
    config = copy.deepcopy(ADAPTERS[adapter])
    config.target_modules = set(TARGETS)
    plain = get_peft_model(dequantized(base), copy.deepcopy(config))
    model = get_peft_model(base, config)
    with torch.no_grad():
        for (name, p), (other, q) in zip(
            [pair for pair in model.named_parameters() if pair[1].requires_grad],
            [pair for pair in plain.named_parameters() if pair[1].requires_grad],
            strict=True,
        ):
            assert name == other
            p.copy_(q.add_(0.02 * torch.randn_like(q)))
    found, expected = gradients(model), gradients(plain)
    assert found.keys() == expected.keys() and found
    # bitsandbytes multiplies by eight bits of the activations as well
    bound = 0.05 if kind == "int8" else 1e-5
    error = torch.stack([(found[name] - expected[name]).norm() for name in found]).norm()
    assert error < bound * torch.stack([g.norm() for g in expected.values()]).norm()
    torch.testing.assert_close(model(IDS).logits, plain(IDS).logits, rtol=0, atol=1e-2 if kind == "int8" else 1e-5)


@pytest.mark.parametrize("kind", QUANTIZED)
def test_a_rotation_is_not_merged_into_a_quantized_weight_nor_into_another(kind: str) -> None:
    model = QUANTIZED[kind](tiny())
    plain = model.lm_head.weight.detach().clone()
    adapted: Any = get_peft_model(
        model, PoetConfig(block_size=16, target_modules=["lm_head", "q_proj"], init_weights=False)
    )
    with pytest.raises(ValueError, match="cannot merge into a weight that is quantized"):
        adapted.merge_adapter()
    assert torch.equal(adapted.get_base_model().lm_head.get_base_layer().weight, plain), "no layer is merged"


@pytest.mark.parametrize("bits", [4, 8])
def test_a_converted_model_with_a_quantized_body(bits: int, tmp_path: Path) -> None:
    model = mt.convert(tiny(tied=True))
    mt.save(model, tmp_path / "model")
    config = BitsAndBytesConfig(load_in_4bit=bits == 4, load_in_8bit=bits == 8, bnb_4bit_quant_type="nf4")
    body: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model", quantization_config=config).eval()
    embedding, expected = body.get_input_embeddings(), model(IDS).logits
    assert isinstance(embedding, PITEmbedding) and body.lm_head.weight is embedding.weight
    logits = body(IDS).logits
    assert 0 < (logits - expected).norm() < (0.5 if bits == 4 else 0.1) * expected.norm()
    body.save_pretrained(tmp_path / "again")
    again: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "again").eval()
    assert isinstance(again.get_input_embeddings(), PITEmbedding)
    torch.testing.assert_close(again(IDS).logits, logits, rtol=0, atol=0)
    adapted = get_peft_model(again, PoetConfig(block_size=16, target_modules=TARGETS))
    optimizer = torch.optim.Adam([p for p in adapted.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(4):
        loss = adapted(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
