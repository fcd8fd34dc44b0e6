"""Every language-model class of transformers through convert, save, load, export and the command line: make sweep-transformers.

Not a test of the suite: it takes half an hour. Each class is built tiny from its configuration, in a process of its own. It has
to work from end to end, or to be refused with the model unchanged. Exits with 1 where a class does neither.
"""

import contextlib
import dataclasses
import hashlib
import inspect
import io
import json
import multiprocessing
import multiprocessing.connection
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
import tyro
from torch import Tensor
from transformers.models.auto import modeling_auto

import manifold_tying as mt
from manifold_tying.cli import main as command_line

MAPPINGS = (
    "CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM",
    "PRETRAINING", "SEQUENCE_CLASSIFICATION",
)  # fmt: skip
SECONDS, LARGEST, MEMORY = 120, 30_000_000, 12 * 2**30

# Sizes by the names that configurations have for them.
V, D, HEADS = 96, 32, 4
SIZES = {
    V: "vocab_size padded_vocab_size text_vocab_size entity_vocab_size",
    D: "hidden_size d_model n_embd embed_dim dim hidden_dim emb_dim word_embed_proj_dim embedding_size d_embed "
    "encoder_hidden_size decoder_hidden_size text_hidden_size rnn_hidden_size input_size entity_emb_size lru_width "
    "attention_hidden_size projection_dim output_dim shared_embedding_size q_lora_rank kv_lora_rank qk_dim v_dim",
    16: "hidden_size_per_layer_input true_hidden_size intra_bottleneck_size state_size ssm_state_size linear_key_head_dim "
    "linear_value_head_dim mamba_d_state",
    8: "head_dim attention_head_dim d_kv kv_channels qk_nope_head_dim v_head_dim qk_rope_head_dim global_head_dim "
    "swa_head_dim mamba_d_head mamba_head_dim index_head_dim lightning_head_dim kda_head_dim",
    HEADS: "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads mamba_n_heads "
    "mamba_num_heads linear_num_value_heads linear_num_key_heads num_local_experts num_experts n_routed_experts "
    "moe_num_experts num_routed_experts index_n_heads attention_heads text_num_attention_heads num_codebooks",
    2: "num_key_value_heads num_kv_heads num_experts_per_tok num_layers num_hidden_layers n_layer n_layers encoder_layers "
    "decoder_layers num_decoder_layers num_encoder_layers depth text_num_hidden_layers num_layer moe_topk top_k_experts "
    "num_experts_per_token moe_k num_block num_blocks index_topk num_nextn_predict_layers text_layers",
    64: "intermediate_size ffn_dim d_ff n_inner encoder_ffn_dim decoder_ffn_dim d_inner inner_dim ffn_hidden_size "
    "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size dim_ff feed_forward_size "
    "expert_dim expert_intermediate_size dense_intermediate_size mlp_hidden_size feedforward_size "
    "max_position_embeddings n_positions max_source_positions max_target_positions max_seq_len max_seq_length "
    "attention_window vocab_size_per_layer_input num_mel_bins image_size",
    1: "n_group topk_group n_groups mamba_n_groups n_shared_experts num_shared_experts first_k_dense_replace",
    0: "pad_token_id",
    3: "bos_token_id decoder_start_token_id",
    5: "eos_token_id",
}  # fmt: skip
TINY = {name: size for size, names in SIZES.items() for name in names.split()}
# What one of these sizes breaks in some configuration; tried one after the other.
FALLBACKS: tuple[dict[str, int | None], ...] = (
    {}, {"num_key_value_heads": HEADS}, {"head_dim": None, "num_key_value_heads": None}, {"image_size": None},
    {"num_layers": None, "num_hidden_layers": 4}, {"num_hidden_layers": None}, {"image_size": None, "hidden_size": None},
)  # fmt: skip


def classes() -> list[str]:
    """Names of the classes in transformers' tables of automatic classes, each once."""
    found: dict[str, None] = {}
    for mapping in MAPPINGS:
        for names in getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES", {}).values():
            found |= dict.fromkeys([names] if isinstance(names, str) else names)
    return list(found)


def tiny_config(kind: Any, changes: dict[str, int | None], depth: int = 0) -> Any:
    """A configuration of ``kind`` with small sizes, its parts' too."""
    fields = {field.name: field.default for field in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else {}
    known = {**inspect.signature(kind.__init__).parameters, **fields}
    sizes = {**TINY, **changes}
    given: dict[str, Any] = {
        name: sizes[name]
        for name in known
        if sizes.get(name) is not None and not isinstance(fields.get(name), (list, tuple, str))
    }
    default = kind() if getattr(kind, "sub_configs", None) else None
    for name in getattr(kind, "sub_configs", {}):
        part = type(getattr(default, name, None))
        if issubclass(part, transformers.PreTrainedConfig) and depth < 3:
            given[name] = tiny_config(part, changes, depth + 1)
    if "tie_word_embeddings" in known or depth == 0:
        given["tie_word_embeddings"] = True
    return kind(**given)


def build(kind: Any) -> Any:
    """A tiny model in evaluation mode, or the error of the last try."""
    last: Exception = ValueError("no configuration class")
    for changes in FALLBACKS:
        try:
            config = tiny_config(kind.config_class, changes)
            with torch.device("meta"):
                size = sum(parameter.numel() for parameter in kind(config).parameters())
            if size > LARGEST:
                raise ValueError(f"{size:,} parameters")
            torch.manual_seed(0)
            return kind(config).eval()
        except Exception as error:
            last = error
    raise last


def logits(model: Any) -> Tensor | None:
    """Scores of random tokens; None for a model that asks for more than tokens."""
    ids = torch.randint(5, 60, (2, 8), generator=torch.Generator().manual_seed(1))
    for more in ({}, {"decoder_input_ids": ids}):
        with contextlib.suppress(Exception), torch.no_grad():
            torch.manual_seed(0)
            out = model(input_ids=ids, **more)
            found = getattr(out, "logits", None)
            found = getattr(out, "prediction_logits", None) if found is None else found
            if isinstance(found, Tensor):
                return found.float()
    return None


def state_hash(model: Any) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode() + tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def off(found: Tensor | None, expected: Tensor | None) -> float:
    """Largest difference relative to the largest entry; infinite where a model that ran does not run any more."""
    if expected is None:
        return 0.0
    if found is None or found.shape != expected.shape:
        return float("inf")
    return float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-30))


def command(*words: Any) -> tuple[int, str]:
    """Exit status and what was printed; an exception passes."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        try:
            command_line(list(map(str, words)))
        except SystemExit as stopped:
            return int(stopped.code or 0), " ".join(text.getvalue().split())
    return 0, " ".join(text.getvalue().split())


def try_class(name: str, folder: Path) -> tuple[str, str]:
    """(outcome, its reason) of a class."""
    kind = getattr(transformers, name, None)
    if kind is None:
        return "not built", "transformers needs another package for it"
    try:
        model = build(kind)
        model.save_pretrained(folder / "stock")
        stock, report = kind.from_pretrained(folder / "stock", output_loading_info=True)
        if wrong := {key: sorted(map(str, names))[:3] for key, names in report.items() if names}:
            return "not built", f"does not survive its own saving: {wrong}"
        model = stock.eval()
    except Exception as error:
        return "not built", f"{type(error).__name__}: {error}"
    before, hashed = logits(model), state_hash(model)
    options: dict[str, Any] = {}
    try:
        mt.convert(model, **options)
    except ValueError as error:
        if 'source="input"' not in str(error):
            return refused(model, before, hashed, folder, str(error))
        options = {"source": "input"}
        try:
            mt.convert(model, **options)
        except ValueError as second:
            return refused(model, before, hashed, folder, str(second))
    return converted(model, kind, options, folder, runs=before is not None)


def refused(model: Any, before: Tensor | None, hashed: str, folder: Path, reason: str) -> tuple[str, str]:
    assert state_hash(model) == hashed, f"refused, but its weights changed: {reason}"
    assert off(logits(model), before) == 0, f"refused, but it computes something else: {reason}"
    status, text = command("convert", folder / "stock", folder / "out")
    assert status == 2 and "error:" in text, f"refused, but the command said {status}, {text}"
    assert not (folder / "out").exists(), "refused, but the command left something"
    return "refused", reason


def converted(model: Any, kind: Any, options: dict[str, Any], folder: Path, runs: bool) -> tuple[str, str]:
    now = logits(model)
    assert (now is not None) == runs, "converts, but does not run any more"
    mt.save(model, folder / "saved")
    assert off(logits(mt.load(folder / "saved").eval()), now) == 0, "loads as another function than it was saved"
    model.save_pretrained(folder / "plain")
    plain, report = kind.from_pretrained(folder / "plain", output_loading_info=True)
    assert not any(report.values()), f"save_pretrained lacks or has too much: {report}"
    assert off(logits(plain.eval()), now) == 0, "transformers loads another function than it saved"
    mt.export(model, folder / "exported")
    stock, report = kind.from_pretrained(folder / "exported", output_loading_info=True)
    assert not any(report.values()), f"the export lacks or has too much: {report}"
    assert off(logits(stock.eval()), now) < 1e-4, f"the export is off by {off(logits(stock), now):.1e}"
    words = ("--source", "input") if options else ()
    for step in (
        ("convert", folder / "stock", folder / "by command", *words),
        ("export", folder / "by command", folder / "exported by command"),
        *(("inspect", folder / name) for name in ("stock", "by command", "exported by command")),
    ):
        status, text = command(*step)
        assert status == 0, f"{step[0]} {step[1].name if step[0] == 'inspect' else ''} exits {status}: {text[-300:]}"
    again = kind.from_pretrained(folder / "exported by command").eval()
    assert off(logits(again), now) < 1e-4, "the commands give another function"
    return "converted", "from the input's table" if options else "tied"


def in_child(name: str, sender: Any) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    signal.setitimer(signal.ITIMER_PROF, SECONDS)  # of processor time, whatever else runs
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1), os.dup2(silent, 2)
    warnings.simplefilter("ignore")
    folder = Path(tempfile.mkdtemp(prefix="sweep-"))
    try:
        outcome = try_class(name, folder)
    except AssertionError as error:
        outcome = "wrong", str(error)
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        outcome = "crashed", f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    sender.send(outcome)


def sweep(names: list[str], jobs: int) -> Iterator[tuple[str, str, str]]:
    """(class, outcome, reason), each in a forked process: the imports are there already."""
    fork = multiprocessing.get_context("fork")
    waiting = list(names)
    running: dict[Any, tuple[str, Any]] = {}
    while waiting or running:
        while waiting and len(running) < jobs:
            name = waiting.pop(0)
            receiver, sender = fork.Pipe(duplex=False)
            process = fork.Process(target=in_child, args=(name, sender))
            process.start()
            sender.close()
            running[receiver] = (name, process)
        waited: list[Any] = multiprocessing.connection.wait(list(running))
        for ready in waited:
            name, process = running.pop(ready)
            try:
                outcome, reason = ready.recv()
            except EOFError:
                process.join()
                outcome, reason = "crashed", f"the process ended with {process.exitcode} (-27: after {SECONDS} s)"
            process.join()
            yield name, outcome, " ".join(reason.split())[:400]


def main(only: str = "", jobs: int = os.cpu_count() or 1, out: Path | None = None) -> None:
    """Try every class whose name the expression ``only`` finds, ``jobs`` at a time; ``out`` gets a JSON line for each."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    names = [name for name in classes() if re.search(only, name)]
    found: list[tuple[str, str, str]] = []
    for row in sweep(names, jobs):
        found.append(row)
        print(f"{len(found):4}/{len(names)} {': '.join(row)}", flush=True)
        if out:
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(dict(zip(("class", "outcome", "reason"), row, strict=True))) + "\n")
    counts = Counter(outcome for _, outcome, _ in found)
    print("\n" + ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common()))
    bad = [row for row in found if row[1] in ("wrong", "crashed")]
    print("\n".join(map(": ".join, bad)))
    sys.exit(bool(bad))


if __name__ == "__main__":
    tyro.cli(main)
