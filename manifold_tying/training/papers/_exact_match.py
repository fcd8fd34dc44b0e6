"""How many questions a model answers with the very text that is expected."""

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Tokenizer

from manifold_tying.training.data.tokenize import separator_id

if TYPE_CHECKING:
    from transformers import PreTrainedModel

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
