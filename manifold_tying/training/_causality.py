"""Whether a model predicts each token from earlier ones only."""

import torch
from torch import nn

POSITIONS, KNOWN = 8, 3
TOLERANCE = 1e-5  # of the largest logit; rounding in a causal model is about 1e-7


@torch.no_grad()
def check_causal(model: nn.Module, vocab_size: int, source: object) -> None:
    """ValueError if the logits (B, N, V) of ``model(input_ids=...)`` depend on later tokens.

    BERT-like models do unless config.json sets is_decoder. Their loss falls because they copy their targets.
    """
    device = next(model.parameters()).device
    ids = torch.randint(vocab_size, (2, POSITIONS), generator=torch.Generator().manual_seed(0)).to(device)
    ids[1, :KNOWN] = ids[0, :KNOWN]
    one, other = (model(input_ids=row[None], use_cache=False).logits[:, :KNOWN].double() for row in ids)
    moved = ((one - other).abs().max() / one.abs().max()).item()
    if moved > TOLERANCE:
        raise ValueError(
            f"expected a model that predicts each token from those before it, but {source} looks at later tokens: changing "
            f"them moves earlier logits by {moved:.1g} of the largest one. It would train on targets that it sees. Choose a "
            "causal language model; set is_decoder in config.json only for weights that were trained that way"
        )
