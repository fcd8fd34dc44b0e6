"""One-line word problems about small sums and differences, generated from templates, for adapting a small model.

They replace GSM8K and SVAMP from section B.2 of the PIT paper: training problems, test problems with the same wordings, and
the same arithmetic in wordings that never occur in training.
"""

import json
import zlib
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch
from tokenizers import Tokenizer

from manifold_tying.training.data.tokenize import separator_id
from manifold_tying.training.files import write_atomic

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Kind = Literal["training", "in-domain", "out-of-domain"]
Problem = tuple[str, str]

THINGS = tuple(
    "files keys lines items names words tests events nodes objects bytes values numbers options errors methods arguments "
    "attributes elements functions classes modules types strings".split()
)
FIRST, SECOND = range(3, 9), range(1, 4)  # the two numbers of a problem
# (sign of the second number, wording)
IN_DOMAIN = (
    (1, "from {a} {things} and {b} more?"),
    (1, "have {a} {things} with {b} added?"),
    (1, "add to {a} {things} another {b}?"),
    (-1, "from {a} {things} without {b}?"),
    (-1, "have {a} {things} with {b} removed?"),
    (-1, "get {a} {things} but not {b}?"),
)
OUT_OF_DOMAIN = (
    (1, "add {b} {things} to {a}?"),
    (1, "with {a} {things} and another {b}?"),
    (-1, "remove {b} from {a} {things}?"),
    (-1, "with {a} {things} without {b}?"),
)
HELD_OUT_EVERY = 4  # one in four in-domain problems is for testing, for any seed


def problems(count: int, seed: int, kind: Kind) -> list[Problem]:
    """Draw different problems (question, answer); the text of a problem is question + answer.

    The answer includes its leading space, which byte-level BPE merges into the number's first token. So the question has the
    same tokens alone and in the text.

    Args:
        count: number of problems, drawn without replacement.
        seed: selects the problems and their order. The kinds are disjoint for any seeds.
        kind: "training", "in-domain" (other problems with the same wordings) or "out-of-domain" (other wordings).

    Raises:
        ValueError: the kind is unknown, or has fewer than ``count`` problems.
    """
    if kind not in get_args(Kind):
        raise ValueError(f"unknown kind {kind!r}; choose one of {', '.join(get_args(Kind))}")
    found = _all(kind)
    if not 1 <= count <= len(found):
        raise ValueError(f"expected 1 <= count <= {len(found)}, the number of {kind!r} problems, got {count}")
    order = np.random.default_rng(seed).permutation(len(found))
    return [found[i] for i in order[:count]]


def write_problems(path: Path, count: int, seed: int, kind: Kind = "training") -> Path:
    """Write :func:`problems` as JSON lines, {"text": question + answer}: a corpus for ``--data jsonl:PATH``."""
    lines = [json.dumps({"text": question + answer}) for question, answer in problems(count, seed, kind)]
    return write_atomic(path, ("\n".join(lines) + "\n").encode())


def _all(kind: Kind) -> list[Problem]:
    """Every problem of a kind, in a fixed order."""
    wordings = OUT_OF_DOMAIN if kind == "out-of-domain" else IN_DOMAIN
    found = [
        (wording.format(things=things, a=a, b=b), f" {a + sign * b}")
        for sign, wording in wordings
        for things in THINGS
        for a in FIRST
        for b in SECOND
    ]
    if kind == "out-of-domain":
        return found
    return [problem for problem in found if _held_out(problem[0]) == (kind == "in-domain")]


def _held_out(question: str) -> bool:
    return zlib.crc32(question.encode()) % HELD_OUT_EVERY == 0


BATCH = 256  # questions decoded together


@torch.no_grad()
def exact_match(
    model: "PreTrainedModel",
    tokenizer: Tokenizer,
    problems: Sequence[tuple[str, str]],
    device: torch.device | str = "cpu",
) -> float:
    """Share of the problems, from 0 to 1, that the model answers exactly, by greedy decoding.

    An answer is right if the text before the end-of-document token is exactly question + answer. A longer answer is wrong. The
    end-of-document token also precedes each question, as it precedes every document in training. (The training loss covers all
    tokens of a document, question and answer.) Questions with the same number of tokens are decoded together, without padding.

    Args:
        model: a transformers causal language model, stock or converted; moved to the device and left in eval mode.
        tokenizer: the model's, with an end-of-document token known to :mod:`manifold_tying.training.data`.
        problems: (question, answer); the tokens of question + answer must start with the question's tokens.
        device: where to compute.

    Raises:
        ValueError: there are no problems, or a token spans the end of a question and the start of its answer.
    """
    if not problems:
        raise ValueError("expected at least one problem, got none")
    end = separator_id(tokenizer, "the tokenizer")
    tokenizer.no_truncation()  # a published tokenizer.json may enable truncation and padding
    tokenizer.no_padding()
    by_length = defaultdict[int, list[tuple[list[int], str]]](list)  # (question ids, expected text)
    longest = 0
    for question, answer in problems:
        ids, whole = (tokenizer.encode(text, add_special_tokens=False).ids for text in (question, question + answer))
        if not ids or whole[: len(ids)] != ids:
            raise ValueError(
                f"expected a question with the same tokens alone and before its answer, got {question!r} before {answer!r}; "
                "start the answer with a space, or end the question with a punctuation mark"
            )
        by_length[len(ids)].append((ids, tokenizer.decode(whole)))
        longest = max(longest, len(whole) - len(ids))
    module: torch.nn.Module = model  # transformers narrows the arguments of nn.Module.to
    module.to(device).eval()
    right = 0
    for group in by_length.values():
        for start in range(0, len(group), BATCH):
            asked = group[start : start + BATCH]
            before = torch.tensor([[end, *question] for question, _ in asked], device=device)
            given = _continue(model, before, longest + 1, end)
            for (question_ids, text), tokens in zip(asked, given, strict=True):
                right += end in tokens and tokenizer.decode(question_ids + tokens[: tokens.index(end)]) == text
    return right / len(problems)


def _continue(model: "PreTrainedModel", ids: torch.Tensor, most: int, end: int) -> list[list[int]]:
    """Greedily continue each row of ids (B, N) by at most ``most`` tokens, up to the end token."""
    generate: Any = model.generate  # mypy infers a tensor
    out = generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=most,
        do_sample=False,
        use_cache=True,
        num_beams=1,  # this and the following override the checkpoint's generation_config.json
        repetition_penalty=1.0,
        eos_token_id=end,
        pad_token_id=end,
    )
    return out[:, ids.shape[1] :].tolist()
