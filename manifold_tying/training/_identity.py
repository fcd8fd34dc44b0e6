"""By what a run is known again: its settings, and the text that it reads, which a path alone does not tell."""

from collections.abc import Mapping
from typing import Any

from manifold_tying.training.config import DEFAULTS
from manifold_tying.training.data import TokenData
from manifold_tying.training.data.tokens import sha256

ARM = "arm"  # in config.json alone: the same run may be called otherwise
CORPUS = "corpus"  # beside the settings, in config.json and in checkpoints
BEGINNING = 1_000_000  # training tokens that are looked at: all of a small corpus, and little of one that fills a disk


def identity_of(tokens: TokenData, evaluated: int) -> dict[str, Any]:
    """What tells one text from another: its tokenizer, its length and beginning, and the ``evaluated`` held-out tokens.

    The last is a hash of tokenizer and tokens: where two runs have the same, their losses are measured on the same, however
    much each of them trains.
    """
    begins = tokens.train[:BEGINNING].astype("<i8").tobytes()
    measured = tokens.val[: evaluated + 1].astype("<i8").tobytes()
    return {
        "tokenizer_sha256": tokens.meta.tokenizer_sha256,
        "train_tokens": len(tokens.train),
        "train_sha256": sha256(begins),
        "evaluated_tokens": evaluated,
        "held_out_sha256": sha256(tokens.meta.tokenizer_sha256.encode() + measured),
    }


def differing(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """The names by which two configurations differ. One that an earlier version did not have yet stood for its default.

    The text is among them where nothing else is: another ``data`` has another text, too. The first versions did not record
    it, and what is not known is no difference.
    """
    there = {k: v for k, v in DEFAULTS.items() if k in here} | dict(there)
    names = sorted(k for k in {*there, *here} - {ARM, CORPUS} if there.get(k) != here.get(k))
    texts = there.get(CORPUS), here.get(CORPUS)
    return names or ([CORPUS] if None not in texts and texts[0] != texts[1] else [])


def other_text(where: str, there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """The error of a run whose text was changed since."""
    before, now = there[CORPUS], here[CORPUS]
    names = ", ".join(k for k in now if before.get(k) != now[k])
    return (
        f"{where} was trained on another text than {here['data']} is now: {names} differ. Losses could not be compared. "
        "Put the text back as it was, or choose another --out"
    )
