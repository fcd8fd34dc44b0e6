"""The two tables of a language model in memory."""

from torch import Tensor, nn

from manifold_tying.tying import TokenInterface


def interface_tables(model: nn.Module) -> tuple[Tensor, Tensor]:
    """(E (V, d), W_out (d, V)) of a model, detached.

    The model is a token interface, has one as ``interface`` (the reference model), or follows Hugging Face's protocol,
    ``get_input_embeddings`` and ``get_output_embeddings``. A factor outside the tables (Gemma's √d, Granite's and
    Cohere's multipliers, a bias of the head) is not part of them.
    """
    interface = getattr(model, "interface", model)
    if isinstance(interface, TokenInterface):
        return interface.materialize()
    embedding, head = embedding_and_head(model)
    for module in (embedding, head):
        tables = module.materialize() if callable(getattr(module, "materialize", None)) else None
        if isinstance(tables, tuple):
            return tables
    return _rows(embedding), _rows(head).mT


def embedding_and_head(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """The modules of a Hugging Face causal language model that read tokens and score them."""
    getters = [getattr(model, f"get_{side}_embeddings", None) for side in ("input", "output")]
    modules = [getter() if callable(getter) else None for getter in getters]
    if not all(isinstance(module, nn.Module) for module in modules):
        raise ValueError(
            f"expected a model with a token interface or a Hugging Face causal language model, got {type(model).__name__} "
            "without both get_input_embeddings() and get_output_embeddings(); load it with AutoModelForCausalLM"
        )
    return modules[0], modules[1]


def _rows(module: nn.Module) -> Tensor:
    """The table (V, d) of an embedding or a linear layer, either of which stores one row per token."""
    materialize = getattr(module, "materialize", None)
    table = materialize() if callable(materialize) else getattr(module, "weight", None)
    if not isinstance(table, Tensor) or table.ndim != 2:
        raise ValueError(f"expected a module with a table (V, d) as its weight, got {type(module).__name__}")
    return table.detach()
