"""A model and its token interfaces on many devices, by torch's FSDP2 and DTensor."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar

from torch import nn

from manifold_tying.parametrizations import OnStiefel, constraints, parametrized
from manifold_tying.tying._pit import PIT
from manifold_tying.tying.interface import TokenInterface

if TYPE_CHECKING:  # importing them takes as long as half of torch, and few need them
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

M = TypeVar("M", bound=nn.Module)
I_ = TypeVar("I_", bound=TokenInterface)


def shard_model(
    model: M,
    mesh: "DeviceMesh | None" = None,
    *,
    blocks: Iterable[nn.Module] = (),
    methods: Sequence[str] = ("loss",),
    mp_policy: "MixedPrecisionPolicy | None" = None,
    reshard_after_forward: bool = True,
) -> M:
    """``fully_shard`` a model in place: every token interface, every block and the rest are one group each.

    What it adds to calling ``fully_shard`` yourself: an interface's methods gather its parameters, as only ``forward`` does
    by default; L and the memory are gathered in float32 whatever ``mp_policy`` says, since T⁻¹ is a matter of float32; and
    constraints whose maps a policy of low precision would spoil are refused. Build the optimizer afterwards, on the sharded
    parameters: ``RiemannianAdam(param_groups(model))``. Construction on the meta device goes ``shard_model``, ``to_empty``,
    ``reset_parameters`` of all parts.

    Args:
        model: with the same values on every process, or on the meta device. Activation checkpointing, torch.compile and
            constraints (``stiefel``, ``equivalence_``, ...) come before.
        mesh: 1-D to shard, 2-D to replicate along the first dimension and shard along the second; all processes where None.
        blocks: modules to gather one at a time, for instance ``model.blocks``.
        methods: of the model that are called in place of ``forward``.
        mp_policy: of the blocks, the rest and plain tables.
        reshard_after_forward: free gathered parameters between forward and backward.

    Raises:
        ValueError: a group that ``mp_policy`` casts below float32 has a trivialization (``orthogonal``, ``spd``,
            ``equivalence``). Leave the policy out and use ``torch.autocast``.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    policy = mp_policy or MixedPrecisionPolicy()
    blocks = list(blocks)
    low = policy.param_dtype is not None and policy.param_dtype.itemsize < 4
    interfaces = [module for module in model.modules() if isinstance(module, TokenInterface)]
    if low:
        _check_trivializations(model, interfaces)
    for interface in interfaces:
        wide = isinstance(interface, PIT) or any(True for _ in constraints(interface))
        fully_shard(
            interface,
            mesh=mesh,
            mp_policy=MixedPrecisionPolicy() if wide else policy,
            reshard_after_forward=reshard_after_forward,
        )
        for name in ("embed", "logits", "loss", "penalty"):
            if hasattr(interface, name):
                register_fsdp_forward_method(interface, name)
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    if model not in interfaces:
        fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
        for name in methods:
            register_fsdp_forward_method(model, name)
    return model


def shard_vocabulary(interface: I_, mesh: "DeviceMesh") -> I_:
    """Give each process of a 1-D mesh its share of the rows of the tables, in place: nothing of them is ever gathered.

    For processes that work on the same tokens, as in tensor parallelism. A lookup sums the vectors found, one all-reduce of
    (tokens, d); the loss reduces three numbers per token (a maximum and two sums) and the gradient of the hidden states,
    (tokens, d); ``logits`` stay sharded by vocabulary, a DTensor. L is replicated, and its gradient comes out the same
    everywhere. The memory's optimizer step takes one all-reduce of d x d per product, as under FSDP2.

    Args:
        interface: with the same values on every process (the same seed), or on the meta device; not sharded yet.
        mesh: of the processes.
    """
    from torch.distributed.tensor import Shard, distribute_tensor

    V, d = interface.vocab_size, interface.hidden_size
    if mesh.ndim != 1:
        raise ValueError(f"expected a 1-D mesh, got one of {mesh.ndim} dimensions; pass mesh['name'] of one of them")
    if V == d:
        raise ValueError(f"expected more tokens than columns, to tell tables from d x d matrices, got {V} of both")
    for module in list(interface.modules()):
        for name, p in list(module.named_parameters(recurse=False)):
            if p.shape == (V, d):
                rows = distribute_tensor(p.detach(), mesh, [Shard(0)], src_data_rank=None)
                setattr(module, name, nn.Parameter(rows, requires_grad=p.requires_grad))
    return interface


def _check_trivializations(model: nn.Module, interfaces: list[TokenInterface]) -> None:
    apart = {module for interface in interfaces for module in interface.modules()}
    for path, owner, name in constraints(model):
        if owner not in apart and not isinstance(parametrized(owner)[name][0], OnStiefel):
            raise ValueError(
                f"the policy's param_dtype would cast what {path} is computed from below float32; leave the policy out and "
                "run under torch.autocast"
            )
