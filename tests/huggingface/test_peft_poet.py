"""PoetConfig as a method of PEFT: its function against NumPy, and what PEFT does with adapters."""

import copy
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import scipy.linalg
import torch
import torch.distributed as dist
from peft import LoraConfig, OFTConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import weight_norm
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.pytorch_utils import Conv1D

import manifold_tying as mt
from manifold_tying.peft import PoetConfig, PoetLayer, convert_oft

TARGETS = ["q_proj", "up_proj", "down_proj", "c_attn", "first", "last"]
IDS = torch.tensor([[1, 5, 2, 8, 3], [0, 4, 4, 9, 7]])
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaForCausalLM(
        LlamaConfig(vocab_size=32, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4)
    ),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=32, n_embd=24, n_layer=2, n_head=4, n_positions=16, bos_token_id=0, eos_token_id=0)
    ),
    "convolution": lambda: nn.Sequential(
        OrderedDict(
            first=nn.Conv2d(8, 12, 3, padding=1, stride=2), between=nn.Tanh(), last=nn.Conv2d(12, 5, (1, 2), bias=False)
        )
    ),
    "plain": lambda: nn.Sequential(OrderedDict(first=nn.Linear(24, 30), between=nn.Tanh(), last=nn.Linear(30, 7))),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "both": {"block_size": 8},
    "ragged": {"block_size": 7, "permute": True, "magnitude": True},
    "in": {"block_size": 4, "sides": "in", "map": "series"},
    "out": {"block_size": 32, "sides": "out"},
    "exp": {"block_size": 8, "map": "exp"},
    "share": {"block_size": 5, "block_share": True, "permute": True},
}


def output(model: Any) -> Tensor:
    with torch.no_grad():
        if isinstance(model.get_base_model() if hasattr(model, "get_base_model") else model, nn.Sequential):
            convolves = any(isinstance(part, nn.Conv2d) for part in model.modules())
            return model(
                torch.linspace(-1, 1, 400).view(2, 8, 5, 5) if convolves else torch.linspace(-1, 1, 48).view(2, 24)
            )
        return model(input_ids=IDS).logits


# PEFT reads a property that transformers renamed.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def adapted(model: Any, adapter: str = "default", **options: Any) -> Any:
    """A copy with an adapter that turns."""
    found = get_peft_model(copy.deepcopy(model), PoetConfig(target_modules=TARGETS, **options), adapter_name=adapter)
    return turned(found, adapter).eval()


def turned(model: Any, adapter: str) -> Any:
    generator = torch.Generator().manual_seed(len(adapter))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "poet_" in name and name.endswith(adapter):
                p.normal_(std=0.1, generator=generator)
    return model


def same(a: Tensor, b: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


def expected_weight(layer: Any, options: dict[str, Any]) -> np.ndarray:
    """diag(1 + g) R W0 P by NumPy."""
    base: Any = layer.get_base_layer()
    W = base.weight.detach().double().numpy()
    W = W.T if type(base).__name__ == "Conv1D" else W
    numbers, b = (
        layer.poet_skew["default"].detach().double().numpy() * 32 / options["block_size"],
        options["block_size"],
    )
    sides, orders = [], list(layer.orders["default"])
    for i, (n, name) in enumerate(zip(W.shape[:2], ("out", "in"), strict=True)):
        matrix = np.eye(n)
        if options.get("sides", "both") in ("both", name):
            blocks, start = [], 0
            rest = n % min(b, n) if n % min(b, n) > 1 and "block_share" not in options else 0
            for size in [min(b, n)] * (n // min(b, n)) + ([rest] if rest else []):
                start = 0 if "block_share" in options else start
                A, count = np.zeros((size, size)), size * (size - 1) // 2
                A[np.triu_indices(size, 1)] = numbers[start : start + count]
                A, start = A - A.T, start + count
                series = np.linalg.solve(np.eye(size) - A, np.eye(size) + A)
                if options.get("map") == "series":
                    series = (np.eye(size) + A) @ (np.eye(size) + A + A @ A)
                elif options.get("map") == "exp":
                    series = scipy.linalg.expm(2 * A)
                blocks.append(series)
            numbers = numbers[start:]
            matrix[: sum(map(len, blocks)), : sum(map(len, blocks))] = scipy.linalg.block_diag(*blocks)
            if orders:
                order = orders[2 * i].numpy()
                place = np.eye(n)[order]
                matrix = place.T @ matrix @ place
        sides.append(matrix)
    if "default" in layer.poet_magnitude:
        sides[0] = np.diag(1 + layer.poet_magnitude["default"].detach().double().numpy()) @ sides[0]
    return np.einsum("ij,jk...,kl->il...", sides[0], W, sides[1])


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("kind", MODELS)
def test_layers_compute_the_formula(kind: str, option: str) -> None:
    model = adapted(MODELS[kind](), **OPTIONS[option])
    layers: list[Any] = [part for part in model.modules() if isinstance(part, PoetLayer)]
    assert layers
    for layer in layers[:3]:
        base, W = layer.get_base_layer(), torch.from_numpy(expected_weight(layer, OPTIONS[option])).float()
        x = torch.randn(2, layer.in_features, 5, 6) if W.ndim == 4 else torch.randn(2, 3, layer.in_features)
        weight = W.T if type(base).__name__ == "Conv1D" else W
        same(layer(x).detach(), torch.func.functional_call(base, {"weight": weight}, (x,)).detach())


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("kind", MODELS)
def test_adapters_are_saved_disabled_merged_and_unmerged(kind: str, option: str, tmp_path: Path) -> None:
    base = MODELS[kind]().eval()
    start = get_peft_model(copy.deepcopy(base), PoetConfig(target_modules=TARGETS, **OPTIONS[option])).eval()
    same(output(start), output(base), 1e-6)
    assert all(p.requires_grad == ("poet_" in name) for name, p in start.named_parameters())
    model = adapted(base, **OPTIONS[option])
    found = output(model)
    assert (found - output(base)).abs().max() > 1e-4
    with model.disable_adapter():
        same(output(model), output(base), 1e-7)
    model.save_pretrained(tmp_path)
    same(output(PeftModel.from_pretrained(copy.deepcopy(base), tmp_path).eval()), found, 1e-7)
    model.merge_adapter()
    same(output(model), found)
    model.unmerge_adapter()
    same(output(model), found)
    plain = model.merge_and_unload(safe_merge=True)
    assert plain.state_dict().keys() == base.state_dict().keys()
    same(output(plain), found)


def test_several_adapters_switch_stack_and_are_deleted() -> None:
    base = MODELS["llama"]().eval()
    first, second = adapted(base, "a", block_size=8), adapted(base, "bb", block_size=6, permute=True)
    model = adapted(base, "a", block_size=8)
    model.add_adapter("bb", PoetConfig(target_modules=TARGETS, block_size=6, permute=True))
    turned(model, "bb")
    same(output(model), output(first), 1e-7)
    model.set_adapter("bb")
    same(output(model), output(second), 1e-7)
    model.base_model.set_adapter(["a", "bb"])
    both = output(model)
    assert min((both - output(one)).abs().max() for one in (first, second)) > 1e-4
    model.merge_adapter()
    same(output(model), both)
    model.unmerge_adapter()
    model.base_model.set_adapter("a")
    model.delete_adapter("bb")
    same(output(model), output(first), 1e-7)


def test_one_side_is_orthogonal_finetuning() -> None:
    """PEFT's OFT trained by the same data has the same number of parameters, and both keep the angles between rows."""
    counts, kept = [], []
    for config in (
        PoetConfig(block_size=8, sides="in", target_modules=["0"]),
        OFTConfig(r=0, oft_block_size=8, target_modules=["0"]),
    ):
        torch.manual_seed(0)
        model: Any = get_peft_model(nn.Sequential(nn.Linear(24, 5)), config)
        before = model.get_base_model()[0].get_base_layer().weight.detach().clone()
        optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.01)
        losses = []
        for _ in range(30):
            optimizer.zero_grad()
            losses.append((model(torch.eye(24)) - 1).square().mean())
            losses[-1].backward()
            optimizer.step()
        assert losses[-1] < losses[0]
        counts.append(sum(p.numel() for p in model.parameters() if p.requires_grad))
        W = model.merge_and_unload()[0].weight.detach()
        kept.append(float((W @ W.T - before @ before.T).abs().max()))
    assert counts[0] == counts[1] == 3 * 28 and kept[0] < 1e-5


@pytest.mark.parametrize("block", [4, 32])
def test_drift_of_a_series_is_that_of_the_singular_values(block: int) -> None:
    square: Any = nn.Sequential(OrderedDict(first=nn.Linear(block, block)))
    nn.init.eye_(square.first.weight)
    model = adapted(square, block_size=block, sides="in", map="series")
    found = mt.optim.drift(model)
    values = torch.linalg.svdvals(model.merge_and_unload().first.weight)
    off = float((values**2 - 1).abs().max())
    assert off > 1e-5 and list(found) == ["base_model.model.first.default"]
    assert 0.99 * off < next(iter(found.values())) < 2 * off


def test_dropped_blocks_are_the_identity_in_training_only() -> None:
    base = MODELS["plain"]()
    model = adapted(base, block_size=1 << 5, module_dropout=0.5)  # one block a side
    layer, plain = model.get_base_model().first, base.first
    x = torch.randn(3, 24)
    expected = layer(x)
    model.train()
    choices = [plain(x), expected]
    found = [layer(x) for _ in range(40)]
    kept = [sum(torch.allclose(y, choice, atol=1e-6) for y in found) for choice in choices]
    assert all(2 <= count <= 20 for count in kept) and sum(kept) < 36  # a quarter each; in the others one side turns


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_cayley_neumann": False},
        {"num_cayley_neumann_terms": 3},
        {"block_share": True, "modules_to_save": ["last"]},
    ],
)
def test_adapters_of_oft_are_converted(options: dict[str, Any], tmp_path: Path) -> None:
    base, targets = MODELS["plain"](), ["first"] if "modules_to_save" in options else ["first", "last"]
    config = OFTConfig(r=0, oft_block_size=6, init_weights=False, target_modules=targets, **options)
    theirs = get_peft_model(copy.deepcopy(base), config).eval()
    theirs.save_pretrained(str(tmp_path / "oft"))
    convert_oft(tmp_path / "oft", tmp_path / "poet")
    ours = PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "poet").eval()
    same(output(ours), output(theirs), 1e-6)
    assert (output(ours) - output(base)).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (OFTConfig(oft_block_size=6, coft=True, target_modules=["first"]), "coft=True"),
        (OFTConfig(oft_block_size=6, bias="all", target_modules=["first"]), "bias='all'"),
        (OFTConfig(oft_block_size=6, num_cayley_neumann_terms=2, target_modules=["first"]), "2 terms"),
        (OFTConfig(r=3, oft_block_size=0, target_modules=["first", "last"]), r"\[8, 10\]"),
        (OFTConfig(oft_block_size=4, target_modules=["first", "table"]), "no embeddings"),
        (PoetConfig(target_modules=["first"]), "got one of"),
    ],
)
def test_other_adapters_are_not_converted(config: Any, message: str, tmp_path: Path) -> None:
    model = MODELS["plain"]()
    model.add_module("table", nn.Embedding(4, 8))
    get_peft_model(model, config).save_pretrained(str(tmp_path / "oft"))
    with pytest.raises(ValueError, match=message):
        convert_oft(tmp_path / "oft", tmp_path / "poet")
    assert not (tmp_path / "poet").exists()


def test_under_autocast_and_in_bfloat16() -> None:
    model = adapted(MODELS["llama"](), block_size=8, magnitude=True)
    exact = output(model)
    with torch.autocast("cpu", torch.bfloat16):
        same(output(model).float(), exact, 0.05)
    low = copy.deepcopy(model).to(torch.bfloat16)
    same(output(low).float(), exact, 0.05)


@pytest.mark.parametrize(
    "layer", [nn.Linear(8, 12), Conv1D(12, 8), nn.Conv1d(8, 12, 1)], ids=lambda layer: type(layer).__name__
)
def test_a_bias_is_added_to_the_rotated_product_alone(layer: nn.Module) -> None:
    model: Any = adapted(nn.Sequential(OrderedDict(first=layer)), block_size=4).to(torch.bfloat16)
    x = torch.randn(8, 8, dtype=torch.bfloat16)
    bias = model.get_base_model().first.get_base_layer().bias.data
    bias.zero_()
    without = model(x)
    bias[::4] = 1000.0  # in bfloat16 its neighbours are 4 away
    same(model(x), without + (bias[:, None] if isinstance(layer, nn.Conv1d) else bias), 0)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_a_layer_with_a_bias_can_be_traced() -> None:
    model, x = adapted(MODELS["plain"](), block_size=4), torch.randn(3, 24)
    traced: Any = torch.jit.trace(model, (x,), check_trace=False)
    same(traced(2 * x), model(2 * x))


class _Stateful(nn.Linear):
    """Its forward is a bound method that keeps its input."""

    def __init__(self, m: int, n: int) -> None:
        super().__init__(m, n)
        self.run = self._run

    def _run(self, x: Tensor) -> Tensor:
        self.newest = x
        return super().forward(x)

    def forward(self, input: Tensor) -> Tensor:
        return self.run(input)


def _compiled() -> nn.Linear:
    layer = nn.Linear(8, 8)
    layer.compile(backend="eager")
    return layer


@pytest.mark.parametrize("make", [_compiled, lambda: _Stateful(8, 8), lambda: weight_norm(nn.Linear(8, 8))])
def test_any_base_layer_runs_itself(make: Callable[[], nn.Module]) -> None:
    base: Any = make()
    config, x = PoetConfig(block_size=4, target_modules=["first"]), torch.randn(3, 8)
    same(get_peft_model(nn.Sequential(OrderedDict(first=base)), config)(x), base(x))
    assert not isinstance(base, _Stateful) or base.newest.shape == (3, 8)


@pytest.mark.parametrize("hooked", [False, True])
def test_threads_may_share_a_layer_with_a_bias(hooked: bool) -> None:
    base: Any = nn.Linear(64, 64)
    model, x = get_peft_model(nn.Sequential(base), PoetConfig(block_size=16, target_modules=["0"])), torch.randn(8, 64)
    if hooked:
        base.register_forward_hook(lambda *_: None)
    expected, bias = model(x), base.bias.detach().clone()
    with ThreadPoolExecutor(8) as threads:
        for y in threads.map(model, [x] * 400):
            same(y, expected, 0)
    same(base.bias, bias, 0)


def test_a_computed_weight_takes_no_merge() -> None:
    model: Any = adapted(nn.Sequential(OrderedDict(first=weight_norm(nn.Linear(8, 8)))), block_size=4)
    with pytest.raises(ValueError, match=r"computed \(prune"):
        model.merge_and_unload()


@pytest.mark.filterwarnings("ignore::UserWarning")  # of PEFT
def test_a_rotation_around_another_adapter_is_not_merged() -> None:
    inner = get_peft_model(nn.Sequential(OrderedDict(first=nn.Linear(8, 8))), LoraConfig(target_modules=["first"]))
    model: Any = get_peft_model(inner, PoetConfig(block_size=4, target_modules=["first"]))
    with pytest.raises(ValueError, match="adapted by an inner layer"):
        model.merge_adapter()


def test_autocast_keeps_its_dtype_around_any_base_layer() -> None:
    model = adapted(nn.Sequential(OrderedDict(first=_Stateful(8, 8))), block_size=4, sides="in")
    with torch.autocast("cpu", torch.bfloat16):
        assert model(torch.randn(3, 8)).dtype == torch.bfloat16


def test_a_projection_that_is_not_called_is_refused() -> None:
    with pytest.raises(ValueError, match=r"that are called, got .* as 'out_proj'"):
        get_peft_model(nn.MultiheadAttention(8, 2), PoetConfig(block_size=4, target_modules=["out_proj"]))


def test_a_small_magnitude_acts_in_low_precision() -> None:
    base = nn.Linear(64, 64, bias=False).bfloat16()
    model: Any = get_peft_model(nn.Sequential(base), PoetConfig(block_size=4, target_modules=["0"], magnitude=True))
    x = torch.randn(8, 64, dtype=torch.bfloat16)
    before = model(x)
    magnitude = model.base_model.model[0].poet_magnitude
    magnitude["default"].data.fill_(3e-3)  # 1.003 is 1 in bfloat16
    assert (model(x) != before).float().mean() > 0.3
    magnitude.bfloat16()
    assert (model(x) != before).float().mean() > 0.3


@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`:UserWarning", "ignore::FutureWarning")
def test_a_model_within_fsdp1_computes_the_same() -> None:
    model, x = adapted(MODELS["plain"](), block_size=4), torch.randn(3, 24)
    expected = model(x)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        same(FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))(x), expected)
    finally:
        dist.destroy_process_group()


def test_hooks_of_a_base_layer_run() -> None:
    base: Any = prune.l1_unstructured(nn.Linear(8, 8), "weight", 0.5)  # computes the weight in a hook
    model = turned(get_peft_model(nn.Sequential(base), PoetConfig(block_size=4, target_modules=["0"])), "default")
    with torch.no_grad():
        base.weight_orig.zero_()
    same(model(torch.ones(2, 8)), base.bias.expand(2, 8), 0)


def test_a_rate_turns_blocks_of_any_size_alike() -> None:
    angles = []
    for block_size in (8, 64):
        torch.manual_seed(0)
        model: Any = get_peft_model(
            nn.Sequential(nn.Linear(64, 64, bias=False)), PoetConfig(block_size=block_size, target_modules=["0"])
        )
        optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        before = model.get_base_model()[0].get_base_layer().weight.detach().clone()
        G = torch.ones(64, 64)
        model.get_base_model()[0](torch.eye(64)).mul(G).sum().backward()
        optimizer.step()
        moved = model.merge_and_unload()[0].weight.detach() - before
        angles.append(float(torch.linalg.matrix_norm(moved, 2) / torch.linalg.matrix_norm(before, 2)))
    assert 0.3 < angles[0] / angles[1] < 3


WRONG: list[tuple[Callable[[], Any], str]] = [
    (lambda: PoetConfig(block_size=1), "block_size"),
    (lambda: PoetConfig(sides=cast(Any, "left")), "unknown sides"),
    (lambda: PoetConfig(map="series", terms=0), "terms"),
    (lambda: PoetConfig(terms=2), "terms=2 needs map='series', got map='exact'"),
    (lambda: PoetConfig(map=cast(Any, "cayley")), "unknown map 'cayley'"),
    (
        lambda: get_peft_model(nn.Sequential(nn.Conv2d(2, 2, 1, groups=2)), PoetConfig(target_modules=["0"])),
        "convolutions of one group that are called, got Conv2d",
    ),
    (lambda: PoetConfig(module_dropout=1.0), "module_dropout"),
    (lambda: PoetConfig(module_dropout=cast(Any, "0")), "module_dropout"),
    (lambda: adapted(MODELS["llama"]())(input_ids=IDS, adapter_names=["default", "__base__"]), "does not mix adapters"),
    (lambda: adapted(MODELS["plain"]()).get_base_model().first.scale_layer(2.0), "cannot be scaled"),
]


@pytest.mark.parametrize(("use", "message"), WRONG)
def test_wrong_use(use: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        use()
