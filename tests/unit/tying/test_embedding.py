"""PITEmbedding beside a plain head: the same function as the interface, in any dtype, and W_out E = I."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from manifold_tying.tying import FreePIT, PITEmbedding

V, D = 40, 8


def pair(**options: Any) -> tuple[PITEmbedding, nn.Linear]:
    embedding, head = PITEmbedding(V, D, **options), nn.Linear(D, V, bias=False)
    head.weight = embedding.weight
    return embedding, head


@pytest.mark.parametrize("shape", [(3, 5), (2, 100), ()])
def test_it_is_the_free_interface(shape: tuple[int, ...]) -> None:
    embedding, head = pair()
    pit, ids = FreePIT.share(embedding.weight), torch.randint(V, shape)
    weights = torch.randn(*shape, D)
    found = []
    for embed, score in ((embedding, head), (pit.embed, pit.logits)):
        e = embed(ids)
        (gradient,) = torch.autograd.grad((e * weights).sum() + score(e).square().sum(), embedding.weight)
        found.append((e, gradient))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])
    torch.testing.assert_close(head.weight.T @ embedding.materialize(), torch.eye(D), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_16_bit_table_is_divided_in_float32_and_rounded_once(dtype: torch.dtype) -> None:
    low, _ = pair(dtype=dtype)
    wide = PITEmbedding.adopt(nn.Embedding.from_pretrained(low.weight.detach().float(), freeze=False))
    ids, weights = torch.randint(V, (3, 30)), torch.randn(3, 30, D, dtype=dtype)
    assert torch.equal(low(ids), wide(ids).to(dtype))
    found, expected = (torch.autograd.grad((e(ids) * weights).sum(), e.weight)[0].float() for e in (low, wide))
    assert torch.dist(found, expected) <= 2 * torch.finfo(dtype).eps * expected.norm()


def test_any_write_to_the_table_counts() -> None:
    embedding, head = pair()
    everything = torch.arange(V)
    for write in (lambda W: W.mul_(2), lambda W: W[3].copy_(W[5]), lambda W: W[:, 1].add_(1e-3)):
        for W in (embedding.weight.data, head.weight.detach()):
            embedding(everything)  # fills the cache
            write(W)
            torch.testing.assert_close(head.weight.T @ embedding(everything), torch.eye(D), rtol=0, atol=1e-5)


def test_padding_scale_copies_and_pickles() -> None:
    embedding, _ = pair(padding_idx=2, scale=3.0)
    plain = PITEmbedding.adopt(nn.Embedding.from_pretrained(embedding.weight, freeze=False))
    ids = torch.tensor([[2, 5], [1, 2]])
    assert torch.equal(embedding(ids), 3 * plain(ids)) and "padding_idx=2, scale=3" in repr(embedding)
    half = PITEmbedding.adopt(nn.Embedding.from_pretrained(embedding.weight), scale=0.5)
    assert torch.equal(half(ids), plain(ids) / 2) and "scale" not in repr(plain)
    (gradient,) = torch.autograd.grad(embedding(ids).sum(), embedding.weight)
    (expected,) = torch.autograd.grad(3 * plain(torch.tensor([5, 1])).sum(), plain.weight)
    torch.testing.assert_close(gradient, expected)
    for twin in (copy.deepcopy(embedding), pickle.loads(pickle.dumps(embedding))):
        assert torch.equal(twin(ids), embedding(ids)) and twin.weight is not embedding.weight


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_it_is_compiled_and_exported() -> None:
    embedding, _ = pair()
    ids = torch.randint(V, (3, 5))
    compiled = torch.compile(embedding, backend="aot_eager", fullgraph=True)
    exported = torch.export.export(embedding, (ids,)).module()
    for f in (compiled, exported):
        torch.testing.assert_close(f(ids), embedding(ids))


def test_wrong_use_is_refused() -> None:
    with pytest.raises(ValueError, match="num_embeddings >= embedding_dim"):
        PITEmbedding(3, 4)
    embedding, _ = pair()
    with pytest.raises(ValueError, match="by calling it"):
        nn.functional.embedding(torch.zeros(1, dtype=torch.long), embedding.weight, max_norm=embedding.max_norm)
    with pytest.raises(IndexError, match=f"0 to {V - 1}"):
        embedding(torch.tensor([V]))
    with pytest.raises(ValueError, match="token ids"):
        embedding(torch.zeros(2))
    with torch.no_grad():
        embedding.weight[:, 0] = embedding.weight[:, 1]
    with pytest.raises(ValueError, match="full column rank"):
        embedding(torch.tensor([1]))
