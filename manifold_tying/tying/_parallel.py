"""Sharding a model and its token interfaces with torch's FSDP2 and DTensor."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar

from torch import nn

from manifold_tying.parametrizations import OnManifold, constraints, parametrized
from manifold_tying.tying._pit import PIT
from manifold_tying.tying.interface import TokenInterface

if TYPE_CHECKING:  # importing these takes half as long as importing torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

M = TypeVar("M", bound=nn.Module)
I_ = TypeVar("I_", bound=TokenInterface)


def shard_model(
    model: M,
    mesh: "DeviceMesh | None" = None,
    *,
    blocks: Iterable[nn.Module] = (),
    methods: Sequence[str] | None = None,
    mp_policy: "MixedPrecisionPolicy | None" = None,
    reshard_after_forward: bool = True,
) -> M:
    """Apply ``fully_shard`` to a model in place: every token interface, every block and the rest are one group each.

    Beyond calling ``fully_shard`` yourself, it makes all methods of an interface gather its parameters (by default only
    ``forward`` does); gathers L and the memory in float32 regardless of ``mp_policy``, because T⁻¹ needs float32; and rejects
    constraints whose maps a low-precision policy would spoil. Build the optimizer afterwards, on the sharded parameters:
    ``RiemannianAdam(param_groups(model))``. For a model on the meta device call ``shard_model``, ``to_empty``, then
    ``reset_parameters`` of all parts.

    Args:
        model: has the same values on every rank, or is on the meta device. Apply activation checkpointing, torch.compile and
            constraints (``stiefel``, ``equivalence_``, ...) first.
        mesh: 1-D to shard, 2-D to replicate along the first dimension and shard along the second; None for all ranks.
        blocks: modules to gather one at a time, for instance ``model.blocks``.
        methods: methods of the model that are called instead of ``forward``; None is ``loss``, if the model has it.
        mp_policy: policy for the blocks, the rest and plain tables. PIT's embeddings get its ``param_dtype``, too.
        reshard_after_forward: free gathered parameters between forward and backward.

    Raises:
        ValueError: a group that ``mp_policy`` casts below float32 has a constraint with a map (``orthogonal``, ``spd``,
            ``equivalence``), for which omit the policy and use ``torch.autocast``; or the model lacks one of the methods.
            Nothing is sharded then.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    policy = mp_policy or MixedPrecisionPolicy()
    blocks = list(blocks)
    if methods is None:
        methods = [name for name in ("loss",) if hasattr(model, name)]
    if missing := [name for name in methods if not hasattr(model, name)]:
        raise ValueError(f"a {type(model).__name__} has no method {', '.join(missing)}; name those that it has")
    low = policy.param_dtype is not None and policy.param_dtype.itemsize < 4
    interfaces = [module for module in model.modules() if isinstance(module, TokenInterface)]
    apart = {module for interface in interfaces for module in interface.modules()}
    for path, owner, name in constraints(model) if low else ():
        if owner not in apart and not isinstance(parametrized(owner)[name][0], OnManifold):
            raise ValueError(
                f"mp_policy.param_dtype would cast the stored tensor of {path} below float32; omit the policy and run under "
                "torch.autocast"
            )
    for interface in interfaces:
        wide = isinstance(interface, PIT) or any(True for _ in constraints(interface))
        if isinstance(interface, PIT) and policy.param_dtype is not None:
            interface.embedding_dtype = policy.param_dtype
        fully_shard(
            interface,
            mesh=mesh,
            mp_policy=MixedPrecisionPolicy() if wide else policy,
            reshard_after_forward=reshard_after_forward,
        )
        for name in ("embed", "logits", "loss"):
            register_fsdp_forward_method(interface, name)
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    if model not in interfaces:
        fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
        for name in methods:
            register_fsdp_forward_method(model, name)
    return model


def shard_vocabulary(interface: I_, mesh: "DeviceMesh") -> I_:
    """Shard the rows of an interface's tables over a 1-D mesh, in place; the tables are never gathered.

    For ranks that process the same tokens, as in tensor parallelism. A lookup takes one all-reduce of (tokens, d). The loss
    all-reduces three numbers per token (a maximum and two sums) and the gradient of the hidden states, (tokens, d).
    ``logits`` returns a DTensor sharded by vocabulary. L is replicated and gets the same gradient on every rank. The memory's
    optimizer step takes one all-reduce of d x d per product, as under FSDP2.

    Args:
        interface: has the same values on every rank (the same seed), or is on the meta device; not sharded yet.
        mesh: 1-D device mesh.
    """
    from torch.distributed.tensor import Shard, distribute_tensor

    V, d = interface.vocab_size, interface.hidden_size
    if mesh.ndim != 1:
        raise ValueError(f"expected a 1-D mesh, got {mesh.ndim} dimensions; pass mesh['name'] for one of them")
    if V == d:
        raise ValueError(f"expected vocab_size > hidden_size, to tell tables from d x d matrices, but both are {V}")
    for module in list(interface.modules()):
        for name, p in list(module.named_parameters(recurse=False)):
            if p.shape == (V, d):
                rows = distribute_tensor(p.detach(), mesh, [Shard(0)], src_data_rank=None)
                setattr(module, name, nn.Parameter(rows, requires_grad=p.requires_grad))
    return interface
