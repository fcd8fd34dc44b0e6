"""A linear layer or convolution whose activations PEFT adapters rotate: y = R (W0 (P x)), without a copy of W0."""

from collections.abc import Sequence
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer, _get_in_out_features, check_adapters_to_merge
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from manifold_tying import precision
from manifold_tying.peft._blocks import Rotation, blocks_of
from manifold_tying.poet import Blocks, RotationSpec, inverse_order, permute, transposed

REFERENCE = 32  # block size at which the stored numbers are the skew entries
_PLAIN = ("torch.nn.modules.", "transformers.pytorch_utils", "bitsandbytes.nn.")  # where layers are free of other state
Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d


class PoetLayer(nn.Module, BaseTunerLayer):
    """W = diag(1 + g) R W0 P for each active adapter, around nn.Linear, transformers' Conv1D, a quantized linear layer or a
    convolution, of which R and P rotate the channels.

    ``poet_skew`` are the skew entries of R's and P's blocks times b / 32: an Adam step then turns blocks of any size b alike,
    and a learning rate does not depend on b (POET's tables have rates proportional to 1 / b). ``poet_magnitude`` is g.
    """

    adapter_layer_names = ("poet_skew", "poet_magnitude")
    other_param_names = ("specs", "orders", "configs")

    def __init__(self, base_layer: nn.Module, adapter_name: str, config: Any) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.poet_skew, self.poet_magnitude = nn.ParameterDict(), nn.ParameterDict()
        self.specs: dict[str, RotationSpec] = {}
        self.orders: dict[str, tuple[Tensor, ...]] = {}  # of rows and columns, and their inverses; empty: none
        self.configs: dict[str, Any] = {}
        self._disable_adapters, self.merged_adapters = False, []
        base: Any = self.get_base_layer()
        sizes: Any = _get_in_out_features(base)
        self.in_features, self.out_features = sizes
        self.transposed = type(base).__name__ == "Conv1D"  # transformers': W is (n, m)
        self.channels = -1 - len(base.kernel_size) if isinstance(base, Convolution) else -1  # the dimension to rotate
        self._active_adapter = adapter_name
        self.update_layer(adapter_name, config)

    def update_layer(self, adapter_name: str, config: Any, inference_mode: bool = False) -> None:
        m, n, b = self.out_features, self.in_features, config.block_size
        terms = {"exact": None, "series": config.terms or 2, "exp": "exp"}[config.map]
        options: Any = ("block", b, None, None, config.sides, terms)
        spec = RotationSpec.of(m, n, *options)
        self.configs[adapter_name] = config
        sides = ((spec.R, "R"), (spec.P, "P")) if config.permute else ()
        orders = (side.sample_permutation(config.seed, 0, name) for side, name in sides)
        self.orders[adapter_name] = tuple(part for order in orders for part in (order, inverse_order(order)))
        spec = RotationSpec.of(min(m, b), min(n, b), *options) if config.block_share else spec
        self.specs[adapter_name] = spec
        start = torch.zeros(spec.num_params)
        self.poet_skew[adapter_name] = nn.Parameter(start if config.init_weights else start.normal_(std=0.1))
        if config.magnitude:
            self.poet_magnitude[adapter_name] = nn.Parameter(torch.zeros(m))
        self._move_adapter_to_device_of_base_layer(adapter_name)
        self.set_adapter(self.active_adapters, inference_mode=inference_mode)

    def set_scale(self, adapter: str, scale: float) -> None:
        """A rotation has no scale: ValueError unless it is 1."""
        if scale != 1:
            raise ValueError(f"a rotation cannot be scaled, got scale {scale} for adapter {adapter!r}; pass 1")

    def scale_layer(self, scale: float) -> None:
        """As :meth:`set_scale`."""
        self.set_scale(", ".join(self.active_adapters), scale)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """y (..., m) of x (..., n), in the base layer's dtype."""
        if self.disable_adapters and self.merged:
            self.unmerge()
        if not (names := self.names_in_use):
            of_base: Tensor = self.base_layer(x, *args, **kwargs)
            return of_base
        sides = {name: self._dropped(name, self._sides(name)) for name in names}
        x = x if self.channels == -1 else x.movedim(self.channels, -1)
        for name in reversed(names):  # the last adapter is outermost: W = R₂ (R₁ W0 P₁) P₂
            x = _rotated(x, sides[name][1], self._orders(name, x)[2:])
        y, bias = self._product(x, *args, **kwargs)
        for name in names:
            y = _rotated(y, sides[name][0], self._orders(name, y)[:2])
            if name in self.poet_magnitude:
                g = self.poet_magnitude[name]  # 16-bit numbers near 1 are coarse
                y = (y * (1 + g.to(precision.compute_dtype(g.dtype)))).to(y.dtype)
        y = y if bias is None else y + bias.to(y.dtype)
        return y if self.channels == -1 else y.movedim(-1, self.channels)

    @property
    def names_in_use(self) -> list[str]:
        """The adapters that :meth:`forward` applies."""
        off = self.disable_adapters or self.merged
        return [] if off else [name for name in self.active_adapters if name in self.specs]

    def _product(self, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """x W0ᵀ and the bias; channels last."""
        base: Any = self.base_layer
        x = x if self.channels == -1 else x.movedim(-1, self.channels)
        layer = _without_bias(base)
        y: Tensor = (base if layer is None else layer)(x, *args, **kwargs)
        y = y if self.channels == -1 else y.movedim(self.channels, -1)
        bias: Tensor | None = getattr(base, "bias", None)
        return (y if bias is None or layer is not None else y - bias.to(y.dtype)), bias

    def rotation(self, name: str) -> Rotation:
        """What :func:`blocks_of` takes for an adapter."""
        return self.poet_skew[name], self.specs[name], REFERENCE / self.configs[name].block_size

    def _sides(self, name: str) -> tuple[Blocks, Blocks]:
        R, P = blocks_of(self.rotation(name))
        if self.configs[name].block_share:
            R, P = (
                [G.expand(n // G.shape[-1], -1, -1) for G in side]
                for side, n in ((R, self.out_features), (P, self.in_features))
            )
        return R, P

    def _dropped(self, name: str, sides: tuple[Blocks, Blocks]) -> tuple[Blocks, Blocks]:
        """In training, random blocks are the identity."""
        p = self.configs[name].module_dropout if self.training else 0
        if not p:
            return sides
        R, P = (
            [torch.where(torch.rand(len(G), 1, 1, device=G.device) < p, precision.eye_like(G), G) for G in side]
            for side in sides
        )
        return R, P

    def _orders(self, name: str, x: Tensor) -> tuple[Tensor, ...]:
        """On x's device; moved there once."""
        if any(part.device != x.device for part in self.orders[name]):
            self.orders[name] = tuple(part.to(x.device) for part in self.orders[name])
        return self.orders[name]

    @torch.no_grad()
    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Multiply adapters into W0. ValueError with ``safe_merge`` if the result is not finite, and for a quantized W0."""
        for name in check_adapters_to_merge(self, adapter_names) or []:
            if name not in self.specs:
                continue
            W = self._turned(self.base_weight(), name, *self._sides(name))
            W = W * self._factor(name, W)
            if safe_merge and not W.isfinite().all():
                raise ValueError(f"the weight merged with adapter {name!r} is not finite; the adapter is damaged")
            self._write(W)
            self.merged_adapters.append(name)

    @torch.no_grad()
    def unmerge(self) -> None:
        """Take the merged adapters out of W0 again, to rounding."""
        if not self.merged:
            return
        W = self.base_weight()
        while self.merged_adapters:
            name = self.merged_adapters.pop()
            R, P = ([torch.linalg.inv(G.double()).to(G.dtype) for G in side] for side in self._sides(name))
            W = self._turned(W / self._factor(name, W), name, R, P)
        self._write(W)

    def base_weight(self) -> Tensor:
        """W0 (m, n), of a convolution (m, ..., n), in float32 or wider. ValueError if it is quantized or computed."""
        base: Any = self.get_base_layer()
        weight: Tensor | None = base._parameters.get("weight")
        plain = weight is not None and weight.is_floating_point() and weight.dtype.itemsize >= 2
        if weight is None or not plain or type(weight.data) is not Tensor or base is not self.base_layer:
            raise ValueError(
                f"cannot merge into a weight that is quantized, computed (prune, weight_norm) or adapted by an inner layer, "
                f"that of {base}; keep the adapter beside it, or load the base model in bfloat16"
            )
        weight = weight.T if self.transposed else weight.movedim(1, -1)
        return weight.to(precision.compute_dtype(weight.dtype))

    def _factor(self, name: str, W: Tensor) -> Tensor | float:
        return (
            1 + self.poet_magnitude[name].to(W.dtype).view(-1, *W[0].ndim * [1]) if name in self.poet_magnitude else 1.0
        )

    def _turned(self, W: Tensor, name: str, R: Blocks, P: Blocks) -> Tensor:
        """R W P."""
        orders = self._orders(name, W)
        with precision.full_precision(W.device):
            return _rotated(_rotated(W, transposed(P), orders[2:]).transpose(0, -1), R, orders[:2]).transpose(0, -1)

    def _write(self, W: Tensor) -> None:
        base: Any = self.get_base_layer()
        base.weight.copy_(W.T if self.transposed else W.movedim(-1, 1))


def _rotated(x: Tensor, blocks: Blocks, orders: Sequence[Tensor]) -> Tensor:
    """G x for each vector x (..., n), G block-diagonal after the permutation."""
    if not blocks:
        return x
    if orders:
        order, inverse = orders
        return permute(_rotated(permute(x, order, inverse), blocks, ()), inverse, order)
    flat, parts, start = x.reshape(-1, x.shape[-1]), [], 0
    for G in blocks:
        k, b = G.shape[0], G.shape[-1]
        part = flat[:, start : start + k * b].unflatten(1, (k, b))
        parts.append(torch.bmm(part.transpose(0, 1), G.mT.to(x.dtype)).transpose(0, 1).flatten(1))
        start += k * b
    rest = [flat[:, start:]] if start < x.shape[-1] else []
    return (parts[0] if len(parts) + len(rest) == 1 else torch.cat([*parts, *rest], 1)).view(x.shape)


def _without_bias(base: Any) -> Any:
    """A shallow copy of a layer without its bias; None if there is none, or only the layer itself computes its result.

    To subtract a large bias instead leaves its rounding, which R would spread to other rows.
    """
    bias, kind = getattr(base, "bias", None), type(base)
    hooks = base._forward_hooks, base._forward_pre_hooks, base._backward_hooks, base._backward_pre_hooks
    watched = any(hooks) or _has_any_global_hook() or "forward" in vars(base) or base._compiled_call_impl is not None
    if bias is None or watched or not kind.__module__.startswith(_PLAIN):
        return None
    copied = base.__new__(kind)
    zeros = torch.zeros_like(bias) if kind.__name__ == "Conv1D" else None  # which cannot be without
    vars(copied).update(vars(base), bias=zeros)  # comes before a parameter, and in the place of FSDP1's view of it
    return copied
