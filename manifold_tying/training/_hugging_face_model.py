"""A transformers model with the interface of Llama that the training loop uses."""

import shutil
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manifold_tying.models import Llama
from manifold_tying.training._causality import check_causal
from manifold_tying.training._hugging_face_start import start_model, write_model
from manifold_tying.tying.huggingface import PITEmbedding

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from manifold_tying.training.config import Settings
from manifold_tying.training.sections import Interface

OUT = "model"  # the trained checkpoint's folder below the run's
TOKENIZER = ("tokenizer*", "special_tokens_map.json", "chat_template*", "vocab.*", "merges.txt", "added_tokens.json")
LORA_ALPHA = 2  # times the rank: the update is 2 B A x


class Tables(nn.Module):
    """A stock model's embedding and head, as a token interface."""

    def __init__(self, embedding: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.embedding: Any = embedding
        self.head: Any = head

    def materialize(self) -> tuple[Tensor, Tensor]:
        """(E (V, d), W_out (d, V)), detached copies."""
        return self.embedding.weight.detach().clone(), self.head.weight.detach().T.contiguous()


class HuggingFaceModel(nn.Module):
    """A transformers causal language model with ``loss``, ``interface``, ``blocks``, and a state dict without tied copies.

    Dropout is off, as in Llama's pretraining. All logits are formed at once, since some models scale or cap them.

    Args:
        model: from :func:`start_model`.
        lora_rank: train low-rank updates (PEFT) of the blocks' linear layers instead of their weights. Plain tables are then
            frozen; PIT's T, and Z if trainable, still train.
    """

    _adapters: Any

    def __init__(self, model: "PreTrainedModel", lora_rank: int | None = None) -> None:
        super().__init__()
        self.model = model.eval()
        adapters = None if lora_rank is None else _with_adapters(model, lora_rank)
        object.__setattr__(self, "_adapters", adapters)  # not a submodule: its parameters are the model's
        named = dict(self.named_parameters())
        names = {parameter: name for name, parameter in named.items()}
        everything = self.named_parameters(remove_duplicate=False)
        self._twins = {name: names[parameter] for name, parameter in everything if name not in named}
        self.register_state_dict_post_hook(_drop_twins)
        self.register_load_state_dict_pre_hook(_add_twins)

    @property
    def interface(self) -> Any:
        """The PIT interface, or :class:`Tables`."""
        embedding: Any = self.model.get_input_embeddings()
        if isinstance(embedding, PITEmbedding):
            return embedding.interface
        return Tables(embedding, self.model.get_output_embeddings())

    @property
    def blocks(self) -> nn.ModuleList:
        """The decoder's layers."""
        count = self.model.config.get_text_config().num_hidden_layers
        return next(m for m in self.model.modules() if isinstance(m, nn.ModuleList) and len(m) == count)

    def forward(self, ids: Tensor) -> Tensor:
        """Token ids (B, N) to next-token scores (B, N, V)."""
        return self.model(input_ids=ids, use_cache=False).logits

    def loss(self, ids: Tensor, targets: Tensor, ignore_index: int = -100) -> Tensor:
        """Mean cross-entropy in nats of targets (B, N), the token after each of ids (B, N)."""
        return F.cross_entropy(self(ids).flatten(0, 1).float(), targets.flatten(), ignore_index=ignore_index)

    def write(self, folder: Path, source: Path) -> None:
        """Write the model as a checkpoint, with low-rank updates merged and the source's tokenizer files."""
        write_model(self.model if self._adapters is None else self._adapters.merge_and_unload(), folder)
        for pattern in TOKENIZER:
            for file in filter(Path.is_file, source.glob(pattern)):
                shutil.copy2(file, folder / file.name)


Model = Llama | HuggingFaceModel


def build_hugging_face_model(interface: "Interface", settings: "Settings", seed: int) -> HuggingFaceModel:
    """The model of a run with ``init_from``; ``seed`` initializes the low-rank updates."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = start_model(settings, interface).eval()
        check_causal(model, settings.vocab_size, settings.init_from)
        return HuggingFaceModel(model, settings.lora_rank).to(settings.device)


def _with_adapters(model: "PreTrainedModel", rank: int) -> Any:
    try:
        import peft
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{error}: lora_rank needs it; install it and the extra: pip install peft 'manifold-tying[huggingface]' "
            "(from a checkout: pip install peft '.[huggingface]')"
        ) from error
    embedding = model.get_input_embeddings()
    trained = [p for p in embedding.parameters() if p.requires_grad] if isinstance(embedding, PITEmbedding) else []
    config = peft.LoraConfig(r=rank, lora_alpha=LORA_ALPHA * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft 0.21 uses an old attribute name of transformers 5.23
        adapted = peft.get_peft_model(model, config)
    for parameter in trained:
        parameter.requires_grad_(True)
    return adapted


def _drop_twins(module: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    for name in module._twins:
        del state[prefix + name]


def _add_twins(module: Any, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    for name, source in module._twins.items():
        if prefix + source in state:
            state[prefix + name] = state[prefix + source]
