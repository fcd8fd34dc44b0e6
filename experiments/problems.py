"""Word problems of one line about small sums and differences, made from templates: a task to adapt a small model to.

Stands for what the PIT paper adapts its models to in section B.2, GSM8K with SVAMP beside it: problems to train on, other
problems in the same wordings to test on, and the same arithmetic in wordings that training never shows.
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
# Each wording with the sign of its second number.
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
HELD_OUT_EVERY = 4  # one in so many in-domain problems is for testing, whatever the seed


def problems(count: int, seed: int, kind: Kind) -> list[Problem]:
    """That many different problems, (question, answer); the text of a problem is question + answer.

    The answer begins with its space, which byte-level BPE makes part of the number's first token, so that the question alone
    has the tokens that it has in the text.

    Args:
        count: how many; they are drawn without repetition.
        seed: which ones, and in which order. No problem is of two kinds, whatever the seeds.
        kind: "training", "in-domain" (other problems in the same wordings) or "out-of-domain" (in wordings of its own).

    Raises:
        ValueError: an unknown kind, or more problems than there are of it.
    """
    if kind not in get_args(Kind):
        raise ValueError(f"unknown kind {kind!r}; choose one of {', '.join(get_args(Kind))}")
    found = _all(kind)
    if not 1 <= count <= len(found):
        raise ValueError(f"expected 1 <= count <= {len(found)}, the problems of kind {kind!r} there are; got {count}")
    order = np.random.default_rng(seed).permutation(len(found))
    return [found[i] for i in order[:count]]


def write_problems(path: Path, count: int, seed: int, kind: Kind = "training") -> Path:
    """:func:`problems` as JSON lines, {"text": question + answer}: a corpus for ``--data jsonl:PATH``."""
    lines = [json.dumps({"text": question + answer}) for question, answer in problems(count, seed, kind)]
    return write_atomic(path, ("\n".join(lines) + "\n").encode())


def _all(kind: Kind) -> list[Problem]:
    """Every problem of a kind, in one order."""
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


BATCH = 256  # questions at a time


@torch.no_grad()
def exact_match(
    model: "PreTrainedModel",
    tokenizer: Tokenizer,
    problems: Sequence[tuple[str, str]],
    device: torch.device | str = "cpu",
) -> float:
    """Share of the problems whose answer the model gives exactly, by greedy decoding up to the end of the document.

    An answer counts if the text up to the token that ends a document is question + answer, to the letter; one that goes on
    after that is wrong. Before a question stands that token, too, as before every document in training. (There the loss runs
    over all tokens of a document, the question's as well as the answer's.)

    Questions of one length in tokens are decoded together, so nothing is padded on their side.

    Args:
        model: a transformers causal language model, stock or converted; it is moved to the device and left there, in
            evaluation mode.
        tokenizer: of the model, with one of the end-of-document tokens that :mod:`manifold_tying.training.data` knows.
        problems: (question, answer); question + answer is the text, and has the question's tokens at its beginning.
        device: where to compute.

    Returns:
        a number from 0 to 1.

    Raises:
        ValueError: no problems, or a question that runs into its answer as tokens.
    """
    if not problems:
        raise ValueError("expected problems to decode the answers of, got none")
    end = separator_id(tokenizer, "the tokenizer")
    tokenizer.no_truncation()  # a published tokenizer.json may ask for both
    tokenizer.no_padding()
    by_length = defaultdict[int, list[tuple[list[int], str]]](list)  # questions and the whole text to be decoded
    longest = 0
    for question, answer in problems:
        ids, whole = (tokenizer.encode(text, add_special_tokens=False).ids for text in (question, question + answer))
        if not ids or whole[: len(ids)] != ids:
            raise ValueError(
                f"expected a question with the tokens that it has in the whole text, got {question!r} before {answer!r}; "
                "begin the answer with a space, or end the question with a mark"
            )
        by_length[len(ids)].append((ids, tokenizer.decode(whole)))
        longest = max(longest, len(whole) - len(ids))
    model.to(device).eval()  # type: ignore[arg-type]  # transformers narrows what nn.Module.to takes
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
    """At most so many tokens after each row of ids (B, N), the likeliest at each place, until the end token."""
    generate: Any = model.generate  # mypy takes it for a tensor
    out = generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=most,
        do_sample=False,
        use_cache=True,
        num_beams=1,  # here and below: whatever the checkpoint's generation_config.json says
        repetition_penalty=1.0,
        eos_token_id=end,
        pad_token_id=end,
    )
    return out[:, ids.shape[1] :].tolist()
