"""Word problems of one line about small sums and differences, made from templates: a task to adapt a small model to.

Stands for what the PIT paper adapts its models to in section B.2, GSM8K with SVAMP beside it: problems to train on, other
problems in the same wordings to test on, and the same arithmetic in wordings that training never shows.
"""

import json
import zlib
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from manifold_tying.training.files import write_whole

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
    return write_whole(path, ("\n".join(lines) + "\n").encode())


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
