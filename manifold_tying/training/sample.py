"""Sample text from the model of a run."""

import math
from pathlib import Path

import torch

from manifold_tying import precision
from manifold_tying.training.build import load_run
from manifold_tying.training.data.tokenize import load_tokenizer, separator_id
from manifold_tying.training.rundir import TOKENIZER


@torch.no_grad()
def sample(path: str | Path, prompt: str = "", *, tokens: int = 200, temperature: float = 1.0, seed: int = 0) -> str:
    """Continue the prompt with the model of a run; the text, prompt included.

    It ends early where the model ends the document. Every token computes the whole context again: there is no cache.

    Args:
        path: a run's folder, for its newest checkpoint, or a checkpoint's folder.
        prompt: the beginning of the text; "" starts a document.
        tokens: most tokens to add.
        temperature: divides the logits; 0 takes the likeliest token.
        seed: seed of the draws.

    Raises:
        ValueError: there is no checkpoint or no tokenizer, it is damaged, or an option is out of range.
    """
    precision.check_int("tokens", tokens, 1)
    precision.check_int("seed", seed, 0)
    if not 0 <= temperature < math.inf:
        raise ValueError(f"expected temperature to be finite and >= 0, got {temperature}")
    folder, model, settings = load_run(Path(path))
    model.eval()
    file = folder.parent.parent / TOKENIZER
    if not file.is_file():
        raise ValueError(f"{file} is missing; repeat the train command with --resume, which writes it")
    tokenizer = load_tokenizer(file.read_bytes(), str(file), settings.vocab_size)
    tokenizer.encode_special_tokens = True  # as in training
    end, known = separator_id(tokenizer, str(file)), tokenizer.get_vocab_size()
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids or [end]
    generator = torch.Generator().manual_seed(seed)
    for _ in range(tokens):
        logits = model(torch.tensor([ids[-settings.sequence_length :]]))[0, -1, :known].float()
        if temperature:
            token = int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator))
        else:
            token = int(logits.argmax())
        if token == end:
            break
        ids.append(token)
    return tokenizer.decode(ids)
