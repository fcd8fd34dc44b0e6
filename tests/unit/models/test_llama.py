"""The reference model against Hugging Face's Llama, against formulas, and against the ways models are handled."""

import copy
import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from derivatives import relative_error
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.parametrize import remove_parametrizations

from manifold_tying import Untied, stiefel
from manifold_tying.models import Llama, LlamaConfig

SEQUENTIAL = LlamaConfig(
    vocab_size=61,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    intermediate_size=48,
    rope_theta=500.0,
    norm_eps=1e-6,
)
PARALLEL = dataclasses.replace(SEQUENTIAL, parallel_block=True, gated_attention=True, norm="layernorm")
FORMS = {
    "sequential": SEQUENTIAL,
    "parallel": PARALLEL,
    "parallel-rmsnorm-embedding-norm": dataclasses.replace(PARALLEL, norm="rmsnorm", embedding_norm=True),
}


def tables(config: LlamaConfig) -> Untied:
    return Untied(config.vocab_size, config.hidden_size, std=1.0)


def build(config: LlamaConfig, *, dtype: torch.dtype = torch.float64) -> Llama:
    """A model in which every parameter matters: large weights, and gains, shifts and gates away from 1, 0 and 1."""
    torch.manual_seed(0)
    model = Llama(config, tables(config)).double()
    with torch.no_grad():
        for parameter in (*model.blocks.parameters(), *model.norm.parameters()):
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model.to(dtype)


def tokens(config: LlamaConfig, batch: int = 2, length: int = 12, seed: int = 1) -> Tensor:
    return torch.randint(config.vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed))


# --- Hugging Face -----------------------------------------------------------------------------------------------------

HUGGING_FACE_NAMES = {
    "blocks.": "model.layers.",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
    "interface.embedding": "model.embed_tokens.weight",
    "interface.head": "lm_head.weight",
}


class WideNorm(nn.Module):
    """Hugging Face's LlamaRMSNorm, which rounds even float64 to float32, without the rounding."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight, self.eps = norm.weight, norm.variance_epsilon

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps))


def hugging_face_twin(model: Llama) -> nn.Module:
    """Hugging Face's model with copies of the weights of ``model``."""
    config = model.config
    weights = {}
    for name, tensor in model.state_dict().items():
        for ours, theirs in HUGGING_FACE_NAMES.items():
            name = name.replace(ours, theirs)
        weights["model.norm.weight" if name == "norm.weight" else name] = tensor.clone()
    twin: Any = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            intermediate_size=config.intermediate_size,
            rms_norm_eps=config.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            tie_word_embeddings=False,
            attn_implementation="sdpa",  # type: ignore[call-arg]  # the eager one rounds its softmax to float32
        )
    )
    twin = twin.to(model.norm.weight.dtype)
    twin.load_state_dict(weights)
    if model.norm.weight.dtype == torch.float64:
        twin.model.norm = WideNorm(twin.model.norm)
        for layer in twin.model.layers:
            layer.input_layernorm = WideNorm(layer.input_layernorm)
            layer.post_attention_layernorm = WideNorm(layer.post_attention_layernorm)
    return twin.eval()


@pytest.mark.parametrize(
    ("changes", "dtype", "tolerance"),
    [
        pytest.param({"num_kv_heads": 4}, torch.float64, 1e-10, id="all-heads"),
        pytest.param({}, torch.float32, 1e-5, id="gqa-float32"),
        pytest.param({"num_kv_heads": 1, "head_dim": 12}, torch.float64, 1e-10, id="one-kv-head-wider-heads"),
    ],
)
def test_sequential_form_is_hugging_face_llama(changes: dict[str, Any], dtype: torch.dtype, tolerance: float) -> None:
    model = build(dataclasses.replace(SEQUENTIAL, **changes), dtype=dtype)
    twin = hugging_face_twin(model)
    ids = tokens(model.config, length=40)
    with torch.no_grad():
        reference = twin(ids).logits
        logits = model(ids)
    assert logits.dtype == reference.dtype == dtype
    assert logits.std() > 1
    assert relative_error(logits, reference) < tolerance


# --- formulas ---------------------------------------------------------------------------------------------------------


def parallel_formula(model: Llama, ids: Tensor) -> Tensor:
    """Logits (N, V) of one sequence, written head by head and position by position."""
    config = model.config
    weights = model.state_dict()
    D, group = config.head_dim, config.num_heads // config.num_kv_heads
    # The convention is float32 angles.
    frequencies = 1 / config.rope_theta ** (torch.arange(0, D, 2, dtype=torch.float32) / D)
    angles = torch.arange(len(ids), dtype=torch.float32)[:, None] * frequencies
    turns = torch.complex(angles.cos().double(), angles.sin().double())

    def norm(x: Tensor, name: str) -> Tensor:
        gain = weights[f"{name}.weight"]
        if config.norm == "rmsnorm":
            return gain * x / (x.square().mean(-1, keepdim=True) + config.norm_eps).sqrt()
        centred = x - x.mean(-1, keepdim=True)
        variance = centred.square().mean(-1, keepdim=True)
        return gain * centred / (variance + config.norm_eps).sqrt() + weights[f"{name}.bias"]

    def turned(x: Tensor, n: int) -> Tensor:
        pairs = torch.complex(x[: D // 2], x[D // 2 :]) * turns[n]
        return torch.cat([pairs.real, pairs.imag])

    x = weights["interface.embedding"][ids]
    if config.embedding_norm:
        x = x / x.square().mean(-1, keepdim=True).sqrt()
    for layer in range(config.num_layers):

        def matrix(name: str, layer: int = layer) -> Tensor:
            return weights[f"blocks.{layer}.{name}.weight"]

        h = norm(x, f"blocks.{layer}.attention_norm")
        attended = torch.zeros(len(ids), config.num_heads * D, dtype=torch.float64)
        for head in range(config.num_heads):
            q_rows = slice(head * D, (head + 1) * D)
            kv_rows = slice(head // group * D, (head // group + 1) * D)
            values = h @ matrix("attention.value")[kv_rows].T
            for n in range(len(ids)):
                query = turned(matrix("attention.query")[q_rows] @ h[n], n)
                keys = torch.stack([turned(matrix("attention.key")[kv_rows] @ h[m], m) for m in range(n + 1)])
                scores = (keys @ query / D**0.5).exp()
                attended[n, q_rows] = scores @ values[: n + 1] / scores.sum()
        gate = weights[f"blocks.{layer}.attention.gate"]
        gated = h @ matrix("mlp.gate").T
        swiglu = gated / (1 + (-gated).exp()) * (h @ matrix("mlp.up").T)
        x = x + (gate * attended) @ matrix("attention.output").T + swiglu @ matrix("mlp.down").T
    return norm(x, "norm") @ weights["interface.head"].T


@pytest.mark.parametrize(("norm", "embedding_norm"), [("rmsnorm", True), ("layernorm", False)])
def test_parallel_form_is_its_formula(norm: Any, embedding_norm: bool) -> None:
    model = build(dataclasses.replace(PARALLEL, norm=norm, embedding_norm=embedding_norm))
    ids = tokens(model.config, batch=3, length=7)
    with torch.no_grad():
        reference = torch.stack([parallel_formula(model, sequence) for sequence in ids])
        assert relative_error(model(ids), reference) < 1e-11
        model.blocks[1].attention.gate[5] *= 1.001  # type: ignore[union-attr, index, operator]
        assert relative_error(model(ids), reference) > 1e-7


def test_low_precision_is_rotated_in_float32() -> None:
    """bfloat16 angles would be the same for neighbouring positions beyond 256."""
    model = build(SEQUENTIAL).bfloat16()
    seen: list[Any] = []
    attention: Any = model.blocks[0].attention
    attention.register_forward_pre_hook(lambda _, args: seen.append(args[1]))
    model(tokens(SEQUENTIAL, length=300))
    cos, sin = seen[0]
    assert cos.dtype == sin.dtype == torch.float32 and len(cos.unique(dim=0)) == 300


@pytest.mark.parametrize("form", FORMS)
def test_nothing_before_a_changed_token_changes(form: str) -> None:
    model = build(FORMS[form])
    ids = tokens(model.config, length=10)
    with torch.no_grad():
        before = model(ids)
        for position in (0, 4, 9):
            changed = ids.clone()
            changed[:, position] = (changed[:, position] + 1) % model.config.vocab_size
            difference = (model(changed) - before).abs().amax(-1)
            assert difference[:, :position].eq(0).all()
            assert difference[:, position:].gt(1e-6).all()


def test_embedding_norm_keeps_a_row_of_zeros_finite() -> None:
    model = build(dataclasses.replace(PARALLEL, embedding_norm=True), dtype=torch.float32)
    ids = tokens(model.config)
    with torch.no_grad():
        model.interface.embedding[ids[0, 0]] = 0  # type: ignore[operator]
    model.loss(ids, ids.roll(-1, 1)).backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())


# --- the loss ---------------------------------------------------------------------------------------------------------


class NoLogits(Untied):
    def logits(self, hidden: Tensor) -> Tensor:
        raise AssertionError("the loss asked for all the logits")


def test_loss_is_the_interfaces_and_knows_what_to_ignore() -> None:
    model = build(PARALLEL)
    ids, targets = tokens(PARALLEL), tokens(PARALLEL, seed=2)
    targets[0, :5] = -7
    with torch.no_grad():
        kept = targets != -7
        expected = F.cross_entropy(model(ids)[kept], targets[kept])
        interface = NoLogits(PARALLEL.vocab_size, PARALLEL.hidden_size).double()
        interface.load_state_dict(model.interface.state_dict())
        model.interface = interface
        assert abs(model.loss(ids, targets, ignore_index=-7).item() - expected.item()) < 1e-5
        assert abs(model.loss(ids, targets.clamp_min(0), ignore_index=-7).item() - expected.item()) > 1e-3


# --- initialization ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_initial_weights(form: str) -> None:
    config = dataclasses.replace(FORMS[form], hidden_size=128, head_dim=32, intermediate_size=192, num_layers=8)
    interface = tables(config)
    table = interface.embedding.detach().clone()
    torch.manual_seed(0)
    model = Llama(config, interface)
    assert torch.equal(interface.embedding, table)
    for name, parameter in model.named_parameters():
        kind = name.removesuffix(".weight").split(".")[-1]
        if name.startswith("interface"):
            continue
        if parameter.ndim == 2:
            expected = 0.02 / 4 if kind in ("output", "down") else 0.02  # √(2·8) = 4
            assert abs(parameter.std().item() / expected - 1) < 0.05, name
        else:
            assert parameter.eq(0 if kind == "bias" else 1).all(), name


@pytest.mark.parametrize("form", FORMS)
def test_a_model_comes_up_from_the_meta_device(form: str) -> None:
    config = FORMS[form]
    model = build(config)
    with torch.device("meta"):
        other = Llama(config, tables(config)).double()
    other = other.to_empty(device="cpu")
    for parameter in other.parameters():
        nn.init.constant_(parameter, float("nan"))
    other.reset_parameters()
    assert all(parameter.isfinite().all() for parameter in (*other.blocks.parameters(), *other.norm.parameters()))
    other.load_state_dict(model.state_dict())
    ids = tokens(config)
    assert torch.equal(other(ids), model(ids))


def test_constrained_weights_are_reset_to_projected_ones() -> None:
    model = Llama(SEQUENTIAL, tables(SEQUENTIAL))
    block: Any = model.blocks[0]
    query: Any = block.attention.query
    kinds: tuple[Any, ...] = (stiefel, parametrizations.orthogonal)
    for constrain in kinds:
        before = constrain(query).weight.detach().clone()
        model.reset_parameters()
        assert not torch.allclose(query.weight, before, atol=0.1)
        torch.testing.assert_close(query.weight @ query.weight.T, torch.eye(len(before)))
        remove_parametrizations(query, "weight")


# --- handling ---------------------------------------------------------------------------------------------------------


def test_a_round_trip_through_another_dtype_leaves_nothing_behind() -> None:
    # Rotary angles kept in a buffer would come back from bfloat16 with 8 bits.
    model = build(PARALLEL)
    ids = tokens(PARALLEL, length=40)
    weights = copy.deepcopy(model.state_dict())
    logits = model(ids)
    model.bfloat16().double().load_state_dict(weights)
    assert torch.equal(model(ids), logits)


@pytest.mark.parametrize("form", FORMS)
def test_bfloat16_autocast(form: str) -> None:
    model = build(FORMS[form], dtype=torch.float32)
    ids = tokens(model.config)
    reference = model.hidden(ids)
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.hidden(ids)
        loss = model.loss(ids, ids.roll(-1, 1))
    loss.backward()
    # The residual stream stays float32; some 2⁻⁹ from each of a dozen roundings per block.
    assert hidden.dtype == torch.float32
    assert 1e-5 < relative_error(hidden, reference) < 0.05
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all() and parameter.grad.any(), name


def test_bfloat16_body_with_a_float32_interface() -> None:
    model = build(PARALLEL, dtype=torch.float32)
    ids = tokens(model.config)
    reference = model(ids)
    model.blocks.bfloat16()
    model.norm.bfloat16()
    logits = model(ids)
    assert model.interface.embed(ids).dtype == torch.float32
    assert logits.dtype == torch.bfloat16
    assert relative_error(logits, reference) < 0.1


# --- errors -----------------------------------------------------------------------------------------------------------


def test_other_sizes_and_shapes_are_refused() -> None:
    sizes: dict[str, Any] = {"vocab_size": 61, "hidden_size": 32}
    for name, own, other in (("vocab_size", 61, 62), ("hidden_size", 32, 64)):
        with pytest.raises(ValueError, match=f"expected an interface with the config's {name} {own}, got {other}"):
            Llama(SEQUENTIAL, Untied(**{**sizes, name: other}))
    model = Llama(SEQUENTIAL, tables(SEQUENTIAL))
    ids = tokens(SEQUENTIAL)
    for wrong in (ids[0], ids[None]):
        with pytest.raises(ValueError, match=r"token ids \(batch, positions\), got .*add a batch dim"):
            model(wrong)
    with pytest.raises(ValueError, match=r"targets must have the shape of ids, \(2, 12\), got \(2, 11\)"):
        model.loss(ids, ids[:, 1:])
