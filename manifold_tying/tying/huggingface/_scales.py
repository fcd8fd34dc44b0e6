"""Learning rates by entry for a model whose residual stream was rotated."""

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from manifold_tying.parametrizations._register import parametrized
from manifold_tying.tying._free_pit import FreePIT
from manifold_tying.tying.huggingface._install import halves
from manifold_tying.tying.huggingface._rotate import final_norm

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@torch.no_grad()
def rotation_scales(model: "PreTrainedModel") -> dict[str, dict[str, Tensor | float]]:
    """Overrides for ``param_groups`` of a model converted with transform="rotation", whose steps are then those of a table.

    Adam moves every entry of a tied table by about its learning rate. Of E = Z T⁻¹ with T = diag(t) it moves column j by
    1/t_j of that, and t spans the condition number of the table: one rate is too much for some columns or nothing for the
    others. With the updates of Z's column j times t_j every entry of E moves by about the learning rate again, so that
    ``manifold_lr`` can be what a plain table would get. In the same way the update of L_ij is multiplied by t_i √t_j (of the
    stored diagonal, whose map multiplies by about √t_j itself, by t_j), and that of the final norm's gain, g / t², by 1 / t².

        groups = param_groups(model, manifold_lr=1e-3, overrides=rotation_scales(model))
        optimizer = RiemannianAdam(groups, lr=1e-3)

    T leaves the diagonal as it is trained; t is its diagonal then. A free table W = Z T takes t_j² for its column j.

    Returns:
        full name of a parameter: {"scale": factors of its updates, "weight_decay": 0.0}.

    Raises:
        ValueError: the model is not converted, or by another transform.
    """
    embedding, _ = halves(model)
    if not embedding.rotated:
        raise ValueError("expected a model that was converted with transform='rotation'; others need no scales")
    t = embedding.interface.transform.diagonal().clone()
    scales: dict[nn.Parameter, Tensor] = {final_norm(model).weight: t**-2}
    if isinstance(embedding.interface, FreePIT):
        scales[embedding.interface.table] = (t**2).expand_as(embedding.interface.table)
    else:
        stored = parametrized(embedding.interface)
        memory, factor = (cast(nn.Parameter, stored[name].original) for name in ("memory", "cholesky_factor"))
        scales |= {memory: t, factor: (t[:, None] * t.sqrt()).tril(-1) + torch.diag(t)}
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {names[parameter]: {"scale": scale, "weight_decay": 0.0} for parameter, scale in scales.items()}
