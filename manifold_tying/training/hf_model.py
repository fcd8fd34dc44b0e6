"""A transformers checkpoint as a run's model, with the methods of Llama that the training loop uses."""

import shutil
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manifold_tying._extra import needs_extra
from manifold_tying.huggingface import convert, load, rotation_scales, save
from manifold_tying.huggingface.checkpoint import load_stock, recorded_mark, write
from manifold_tying.huggingface.native import MARK, is_converted, pit_embedding
from manifold_tying.huggingface.tables import read_tables
from manifold_tying.models import Llama
from manifold_tying.training.sections import Interface
from manifold_tying.training.split_table import MemoryHead, SplitTable
from manifold_tying.tying import FreePIT, Memory, linear_cross_entropy

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from manifold_tying.training.config import Settings

MEMORIES: dict[str, Memory] = {"pit-frozen": "frozen", "pit-trainable": "trainable"}


def start_model(settings: "Settings", interface: "Interface") -> "PreTrainedModel":
    """Load the checkpoint in float32; the PIT arms convert a stock one.

    "transpose" keeps its table, and "untied" copies it to both sides.
    """
    assert settings.init_from is not None
    if recorded_mark(settings.init_from) is not None:
        return load(settings.init_from, dtype=torch.float32)
    model = load_stock(settings.init_from, dtype=torch.float32)
    read_tables(model)  # raises for untied tables, in every arm
    if interface == "untied":
        head = model.get_output_embeddings()
        head.weight = nn.Parameter(head.weight.detach().clone())
        for config in (model.config, model.config.get_text_config()):
            config.tie_word_embeddings = False
        model.all_tied_weights_keys = model.get_expanded_tied_weights_keys(all_submodels=False)
    elif interface != "transpose":
        convert(model, transform=settings.init_transform)
    return model


_WRITTEN = (
    "config.json", "generation_config.json", "*.index.json", "*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.h5"
)  # fmt: skip
OUT = "model"  # folder of the trained checkpoint in the run's folder
LORA_ALPHA = 2  # as a multiple of the rank: the update is 2 B A x


class Tables(nn.Module):
    """A stock model's embedding and head, as a token interface."""

    def __init__(self, embedding: Any, head: Any) -> None:
        super().__init__()
        self.embedding, self.head = embedding, head

    def materialize(self) -> tuple[Tensor, Tensor]:
        """(E (V, d), W_out (d, V)), detached copies."""
        return self.embedding.weight.detach().clone(), self.head.weight.detach().T.contiguous()


class HuggingFaceModel(nn.Module):
    """A transformers causal language model with ``loss``, ``interface``, ``blocks``, and a state dict without tied copies.

    Dropout is off, as in Llama's pretraining. The loss holds a chunk of the logits at a time, also where the model scales or
    caps them. It forms all logits if the head has a bias or :func:`measured_head` does not recognize what follows it.

    Args:
        model: from :func:`start_model`.
        lora_rank: train low-rank updates (PEFT) of the blocks' linear layers instead of their weights. This freezes plain
            tables; PIT's still train, except for a frozen Z.
        split: the table of a converted model as Z and T.
    """

    _adapters: Any

    def __init__(self, model: "PreTrainedModel", lora_rank: int | None = None, split: SplitTable | None = None) -> None:
        super().__init__()
        self.model, self._split = model.eval(), split
        self._head = measured_head(model)
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
        if self._split is not None:
            return self._split.interface
        if is_converted(self.model):
            return FreePIT.share(pit_embedding(self.model).weight)
        return Tables(self.model.get_input_embeddings(), self.model.get_output_embeddings())

    def rotation_scales(self) -> dict[str, dict[str, Any]]:
        """Overrides of ``param_groups`` for a rotated residual stream; empty without."""
        scales: dict[str, dict[str, Any]] = {}
        if self._split is not None:
            scales = self._split.rotation_scales(self.model)
        elif is_converted(self.model) and self.model.config.manifold_tying["rotated"]:
            scales = rotation_scales(self.model)
        return {f"model.{name}": options for name, options in scales.items()}

    @property
    def blocks(self) -> nn.ModuleList:
        count = self.model.config.get_text_config().num_hidden_layers
        return next(m for m in self.model.modules() if isinstance(m, nn.ModuleList) and len(m) == count)

    def forward(self, ids: Tensor) -> Tensor:
        """Token ids (B, N) to next-token scores (B, N, V)."""
        logits: Tensor = self.model(input_ids=ids, use_cache=False).logits
        return logits

    def loss(self, ids: Tensor, targets: Tensor, ignore_index: int = -100) -> Tensor:
        """Mean cross-entropy in nats of targets (B, N), the token after each of ids (B, N)."""
        if self._head is None:
            return F.cross_entropy(self(ids).flatten(0, 1).float(), targets.flatten(), ignore_index=ignore_index)
        scale, softcap = self._head
        hidden = self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state * scale
        if self._split is not None:
            return self._split.interface.loss(hidden, targets, ignore_index=ignore_index, softcap=softcap)
        table: Any = self.model.get_output_embeddings().weight
        return linear_cross_entropy(hidden, table, targets, ignore_index=ignore_index, softcap=softcap)

    def write(self, folder: Path, source: Path) -> None:
        """Write the model, converted for PIT, else stock, with low-rank updates merged and the source's other files."""
        model = self.model if self._adapters is None else self._adapters.merge_and_unload()
        if self._split is not None:
            self._split.join(model)
        (save if is_converted(model) else write)(model, folder)
        copy_rest(source, folder)


Model = Llama | HuggingFaceModel


def build_hugging_face_model(interface: "Interface", settings: "Settings", seed: int) -> HuggingFaceModel:
    """The model of a run with ``init_from``; ``seed`` initializes the low-rank updates."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = start_model(settings, interface).eval()
        split = None
        if memory := MEMORIES.get(interface):
            split = SplitTable(model, memory=memory, retraction=settings.retraction, diagonal=settings.diagonal)
        check_causal(model, settings.vocab_size, settings.init_from)
        return HuggingFaceModel(model, settings.lora_rank, split).to(settings.device)


def copy_rest(model: Path, out: Path) -> None:
    """Copy tokenizer, chat templates, license: all but weights and what transformers writes. A README in ``out`` stays."""
    for file in filter(Path.is_file, model.iterdir()):
        kept = file.name == "README.md" and (out / file.name).exists()
        if not kept and not any(file.match(pattern) for pattern in _WRITTEN):
            shutil.copy2(file, out / file.name)
    if (templates := model / "additional_chat_templates").is_dir():
        shutil.copytree(templates, out / templates.name, dirs_exist_ok=True)


def _with_adapters(model: "PreTrainedModel", rank: int) -> Any:
    with needs_extra("peft", "lora_rank needs"):
        import peft
    trained = [p for p in model.get_input_embeddings().parameters() if p.requires_grad and hasattr(model.config, MARK)]
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


POSITIONS, KNOWN = 8, 3
TOLERANCE = 1e-5  # of the largest logit; rounding in a causal model is about 1e-7
PROBE = 100.0  # scores of the head up to here are followed to the logits: a cap shows


@torch.no_grad()
def measured_head(model: "PreTrainedModel") -> tuple[float, float | None] | None:
    """(scale, c) if the logits are scale · h Wᵀ, or c tanh(h Wᵀ / c), of the body's last states h; else None.

    A hook replaces the head's result, so that the scores seen are larger than those of an untrained model.
    """
    head, base = model.get_output_embeddings(), model.base_model
    if type(head) not in (nn.Linear, MemoryHead) or head.bias is not None or base is model:
        return None
    ids = torch.arange(POSITIONS, device=head.weight.device)[None] % len(head.weight)
    hidden: Any = getattr(base(input_ids=ids, use_cache=False), "last_hidden_state", None)
    scores = torch.linspace(-PROBE, PROBE, POSITIONS * len(head.weight)).view(1, POSITIONS, -1).to(head.weight)
    inputs: list[Tensor] = []

    def replace(_: nn.Module, given: tuple[Tensor, ...], __: Tensor) -> Tensor:
        inputs.append(given[0])
        return scores

    with head.register_forward_hook(replace):
        logits = model(input_ids=ids, use_cache=False).logits
    if not (isinstance(hidden, Tensor) and logits.shape == scores.shape and torch.equal(inputs[0], hidden)):
        return None
    softcap: float | None = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    scale = 1.0 if softcap else float(logits[0, -1, -1]) / PROBE
    expected = softcap * (scores / softcap).tanh() if softcap else scale * scores
    same = float((logits - expected).abs().max()) <= TOLERANCE * float(logits.abs().max())
    return (scale, softcap) if same else None


@torch.no_grad()
def check_causal(model: nn.Module, vocab_size: int, source: object) -> None:
    """Raises ValueError if the logits (B, N, V) of ``model(input_ids=...)`` depend on later tokens.

    In BERT-like models they do, unless config.json sets is_decoder. Their loss falls because they copy their targets.
    """
    device = next(model.parameters()).device
    ids = torch.randint(vocab_size, (2, POSITIONS), generator=torch.Generator().manual_seed(0)).to(device)
    ids[1, :KNOWN] = ids[0, :KNOWN]
    one, other = (model(input_ids=row[None], use_cache=False).logits[:, :KNOWN].double() for row in ids)
    moved = ((one - other).abs().max() / one.abs().max()).item()
    if moved > TOLERANCE:
        raise ValueError(
            f"expected a model that predicts each token from those before it, but {source} looks at later tokens: changing "
            f"them moves earlier logits by {moved:.1g} of the largest one. In training it would see its targets. Choose a "
            "causal language model; set is_decoder in config.json only for weights that were trained that way"
        )
