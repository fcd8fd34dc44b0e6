"""The two tables of a language model in memory."""

from typing import Any

from torch import Tensor, nn

from manifold_tying.tying import TokenInterface


def interface_tables(model: nn.Module) -> tuple[Tensor, Tensor]:
    """(E (V, d), W_out (d, V)) of a model, detached.

    The model is a token interface, has one as ``interface`` (the reference model), or follows Hugging Face's protocol,
    ``get_input_embeddings`` and ``get_output_embeddings``. A factor outside the tables (Gemma's √d, Granite's and
    Cohere's multipliers, a bias of the head) is not part of them.
    """
    if (interface := token_interface(model)) is not None:
        return interface.materialize()
    sides = []
    for module in embedding_and_head(model):
        tables = _table(module)
        if isinstance(tables, tuple):
            return tables
        sides.append(tables)
    return sides[0], sides[1].mT


def token_interface(module: nn.Module) -> TokenInterface | None:
    """The token interface that a module is or owns."""
    found = getattr(module, "interface", module)
    return found if isinstance(found, TokenInterface) else None


def embedding_and_head(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """The modules of a Hugging Face causal language model that read tokens and score them."""
    embedding, head = (_call(model, f"get_{side}_embeddings") for side in ("input", "output"))
    if not isinstance(embedding, nn.Module) or not isinstance(head, nn.Module):
        raise ValueError(
            f"expected a model with a token interface or a Hugging Face causal language model, got {type(model).__name__} "
            "without both get_input_embeddings() and get_output_embeddings(); load it with AutoModelForCausalLM"
        )
    return embedding, head


def _table(module: nn.Module) -> Tensor | tuple[Tensor, Tensor]:
    """What a module computes with: its table (V, d), one row per token as embeddings and linear layers have, or both tables."""
    if (interface := token_interface(module)) is not None:
        return interface.materialize()
    table = _call(module, "materialize")
    if isinstance(table, tuple):
        return table
    table = getattr(module, "weight", None) if table is None else table
    if not isinstance(table, Tensor) or table.ndim != 2:
        raise ValueError(f"expected a module with a table (V, d) as its weight, got {type(module).__name__}")
    return table.detach()


def _call(module: nn.Module, method: str) -> Any:
    """What a method without arguments returns, None where there is none."""
    found: Any = getattr(module, method, None)
    return found() if callable(found) else None
