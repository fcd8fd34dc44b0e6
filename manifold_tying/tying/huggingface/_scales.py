"""Per-entry learning rates for a model with a rotated residual stream."""

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
    """Overrides for ``param_groups`` that give a model converted with transform="rotation" the steps of a plain table.

    Adam moves every entry of a tied table by about its learning rate. For E = Z T⁻¹ with T = diag(t) it moves column j by
    1/t_j times that. t spans the condition number of the table, so no single rate suits all columns. Multiplying the updates
    of Z's column j by t_j moves every entry of E by about the learning rate, so ``manifold_lr`` can be that of a plain table.
    Likewise the update of L_ij is multiplied by t_i √t_j, that of the stored diagonal by t_j (its map already multiplies by
    about √t_j), and that of the final norm's gain, g / t², by 1 / t².

        groups = param_groups(model, manifold_lr=1e-3, overrides=rotation_scales(model))
        optimizer = RiemannianAdam(groups, lr=1e-3)

    Training makes T non-diagonal; t is then its diagonal. Column j of a free table W = Z T uses t_j².

    Returns:
        For each full parameter name: {"scale": factors of its updates, "weight_decay": 0.0}.

    Raises:
        ValueError: the model is not converted, or was converted with another transform.
    """
    embedding, _ = halves(model)
    if not embedding.rotated:
        raise ValueError("expected a model converted with transform='rotation'; other models need no scales")
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
