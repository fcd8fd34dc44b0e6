"""Logit lens, transition traces, and nearest anchors, against explicit formulas and Hugging Face's own states."""

import copy
import itertools
import sys
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_models import D, V, build
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.colors import to_rgb
from references import reference

import manifold_tying as mt
from manifold_tying import models
from manifold_tying.diagnostics import (
    draw_traces,
    inspect_tables,
    interface_tables,
    nearest_anchors,
    transition_trace,
)
from manifold_tying.diagnostics.trace import residual_stream

CASES = settings(max_examples=20, deadline=None, derandomize=True)
LAYERS = 2
IDS = torch.tensor([3, 17, 8, 41])


def hugging_face(name: str) -> Any:
    model = build(name, hidden_size=D)  # which OPT projects otherwise
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name or "ln_" in name:  # a norm of ones could be left out without a trace
                p.uniform_(0.5, 2)
    return model


def with_gains(interface: mt.TokenInterface | None = None, **options: Any) -> models.Llama:
    model = reference(mt.PIT(V, D, memory="frozen") if interface is None else interface, **options)
    torch.nn.init.uniform_(model.norm.weight, 0.5, 2)
    return model


@pytest.mark.parametrize(("kind", "parallel"), [(mt.Untied, False), (mt.PIT, True)])
def test_lens_of_the_reference_model(kind: Any, parallel: bool) -> None:
    interface = kind(V, D) if kind is mt.PIT else kind(V, D, std=0.5)
    model = with_gains(interface, parallel_block=parallel)
    trace = transition_trace(model, IDS, top=4)
    assert trace.top.shape == trace.probabilities.shape == trace.input_anchors.ids.shape == (LAYERS + 1, 4)
    prediction = model(IDS[None])[0, -1].softmax(-1)
    torch.testing.assert_close(trace.probabilities[-1], prediction.topk(4)[0])
    assert torch.equal(trace.top[-1], prediction.topk(4)[1])
    # a model with the rest of its blocks cut off predicts what the lens shows at that layer
    cut = copy.deepcopy(model)
    for layer in range(LAYERS, -1, -1):
        cut.blocks = cut.blocks[:layer]
        expected = cut(IDS[None])[0, -1].softmax(-1)
        torch.testing.assert_close(trace.probabilities[layer], expected.topk(4)[0])
        torch.testing.assert_close(trace.states[layer], cut.hidden(IDS[None])[0, -1])
    # negative control: without a difference between layers the check above would say nothing
    assert not torch.allclose(trace.probabilities[0], trace.probabilities[-1], atol=1e-3)


@pytest.mark.parametrize("name", ["Llama", "GPT-2", "Granite", "Gemma 3", "Cohere", "OPT"])
def test_lens_of_hugging_face_models(name: str) -> None:
    model = hugging_face(name)
    trace = transition_trace(model, IDS, top=4)
    with torch.no_grad():
        output = model(IDS[None], output_hidden_states=True)
    prediction = output.logits[0, -1].float().softmax(-1)
    torch.testing.assert_close(trace.probabilities[-1], prediction.topk(4)[0])
    assert torch.equal(trace.top[-1], prediction.topk(4)[1])
    assert len(trace.top) == LAYERS + 1 == len(output.hidden_states)
    torch.testing.assert_close(trace.states[-1], output.hidden_states[-1][0, -1])
    stream = residual_stream(model, IDS)
    for layer in range(LAYERS):  # the last of Hugging Face's is normed, ours is not
        assert torch.equal(stream.states[layer], output.hidden_states[layer][0, -1])
    assert not torch.allclose(stream.states[-1], output.hidden_states[-1][0, -1])
    W_out = interface_tables(model)[1]
    assert torch.equal(trace.output_anchors.ids, nearest_anchors(trace.states, W_out.T, 4).ids)


def test_the_embedding_is_nearest_to_its_own_token() -> None:
    for norm in (False, True):
        trace = transition_trace(with_gains(embedding_norm=norm), IDS)
        assert trace.input_anchors.ids[0, 0] == IDS[-1] and trace.input_anchors.cosines[0, 0] == pytest.approx(1)
    trace = transition_trace(with_gains(), IDS, position=1)
    assert trace.input_anchors.ids[0, 0] == IDS[1]


def test_smoothness_is_its_four_formulas() -> None:
    model = with_gains()
    trace = transition_trace(model, IDS, top=V)
    p = np.zeros((LAYERS + 1, V))
    np.put_along_axis(p, trace.top.numpy(), trace.probabilities.numpy().astype(float), 1)
    h = trace.states.double().numpy()
    cosines = [a @ b / np.linalg.norm(a) / np.linalg.norm(b) for a, b in itertools.pairwise(h)]
    assert trace.smoothness.distribution_step == pytest.approx(np.abs(np.diff(p, axis=0)).sum(1).mean() / 2, rel=1e-5)
    assert trace.smoothness.label_changes == np.mean(np.diff(p.argmax(1)) != 0)
    assert trace.smoothness.turn == pytest.approx(np.arccos(cosines).mean(), rel=1e-6)
    E, W_out = (t.double().numpy() for t in interface_tables(model))
    f = residual_stream(model, IDS).states.double().numpy()
    sides = [np.argmax(x @ (B / np.linalg.norm(B, axis=1, keepdims=True)).T, 1) for x, B in ((f, E), (h, W_out.T))]
    assert trace.smoothness.side_disagreement == np.mean(sides[0] != sides[1])
    # blocks that do nothing: nothing changes on the way
    for block in model.blocks:
        for p_ in block.parameters():
            torch.nn.init.zeros_(p_)
    still = transition_trace(model, IDS).smoothness
    assert still.label_changes == still.distribution_step == 0 and still.turn < 1e-7


def test_a_trace_leaves_the_model_as_it_was() -> None:
    for model in (with_gains(), hugging_face("Llama")):
        model.train()
        list(model.children())[-1].eval()
        modes = [module.training for module in model.modules()]
        before = {name: value.clone() for name, value in model.state_dict().items()}
        model(IDS[None], **({} if isinstance(model, models.Llama) else {"output_hidden_states": True}))
        hooks = [(len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.modules()]
        trace = transition_trace(model, IDS)
        assert modes == [module.training for module in model.modules()]
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        # Hugging Face leaves hooks of its own
        assert hooks == [(len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.modules()]
        assert not trace.states.requires_grad


def test_a_model_whose_readout_is_not_known_is_refused() -> None:
    model = hugging_face("Llama")
    model.lm_head.register_forward_hook(lambda _, __, out: out)
    inner = model.forward

    def other(*args: Any, **options: Any) -> Any:
        output = inner(*args, **options)
        output.logits = output.logits * 3
        return output

    model.forward = other
    with pytest.raises(ValueError, match="do not give its prediction"):
        transition_trace(model, IDS)
    model.forward = inner
    model.model.norm.register_forward_hook(lambda _, __, out: out.clone())
    model.model.norm = torch.nn.Sequential(model.model.norm)  # still found, by its output
    transition_trace(model, IDS)


def test_errors_of_traces() -> None:
    model = with_gains()
    for ids, position in ((IDS[None], 0), (IDS, 4), (IDS[:0], 0)):
        with pytest.raises(ValueError, match=r"token ids \(N,\)"):
            transition_trace(model, ids, position=position)
    with pytest.raises(ValueError, match="expected top in"):
        transition_trace(model, IDS, top=V + 1)
    with pytest.raises(ValueError, match="get_output_embeddings"):
        transition_trace(torch.nn.Linear(2, 2), IDS)


def test_rows_and_picture_of_traces(tmp_path: Any) -> None:
    traces = {
        "PIT": transition_trace(with_gains(), IDS),
        "transpose": transition_trace(with_gains(mt.TransposeTying(V, D)), IDS),
    }
    vocabulary = [f"t{v}" for v in range(V)]
    vocabulary[int(traces["PIT"].top[-1, 0])] = " $x$ "
    rows = traces["PIT"].rows(vocabulary.__getitem__)
    assert len(rows) == LAYERS + 1 and all(len(row) == 4 for row in rows)
    assert rows[-1][0] == str(LAYERS) and rows[-1][1].startswith(vocabulary[int(traces["PIT"].top[-1, 0])])
    assert f"t{IDS[-1]} 1.000" == rows[0][2]
    figure = draw_traces(traces, vocabulary.__getitem__)
    assert [axes.get_title().split(":")[0] for axes in figure.axes] == list(traces)
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert len(texts) == 3 * (LAYERS + 1) and texts[0] == f"t{IDS[-1]}"
    figure.savefig(tmp_path / "trace.png")
    assert (tmp_path / "trace.png").read_bytes().startswith(b"\x89PNG")
    every = [(text, cell) for axes in figure.axes for text, cell in zip(axes.texts, axes.patches, strict=True)]
    colours = {(text.get_text(), to_rgb(cell.get_facecolor())) for text, cell in every}
    assert len(colours) == len({text for text, _ in colours})  # one for each token, whichever panel
    with pytest.raises(ValueError, match="at least one trace"):
        draw_traces({})


def test_what_is_not_installed_is_named(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("matplotlib", "safetensors"):
        monkeypatch.setitem(sys.modules, name, None)
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}')
    (tmp_path / "model.safetensors").write_bytes(b"")
    for call in (lambda: draw_traces({}), lambda: inspect_tables(tmp_path)):
        with pytest.raises(ImportError, match=r"manifold-tying\[train\]"):
            call()


# Anchors


@CASES
@given(
    n=st.integers(1, 6), rows=st.integers(1, 80), d=st.integers(1, 5), k=st.integers(1, 8), seed=st.integers(0, 10**6)
)
def test_nearest_anchors_are_the_largest_cosines(n: int, rows: int, d: int, k: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    states, anchors = rng.normal(size=(n, d)), rng.normal(size=(rows, d))
    k = min(k, rows)
    cosines = states @ anchors.T / np.linalg.norm(states, axis=1)[:, None] / np.linalg.norm(anchors, axis=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("manifold_tying.diagnostics.bases._BLOCK_ENTRIES", 1)  # blocks of 4d rows
        found = nearest_anchors(torch.from_numpy(states), torch.from_numpy(anchors), k)
    np.testing.assert_allclose(found.cosines.numpy(), -np.sort(-cosines, 1)[:, :k], rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(np.take_along_axis(cosines, found.ids.numpy(), 1), found.cosines.numpy(), atol=1e-14)


def test_zero_anchors_and_states_are_near_to_nothing() -> None:
    anchors = torch.tensor([[0.0, 0.0], [1.0, 1.0]])
    assert nearest_anchors(torch.tensor([[1.0, 1.0]]), anchors).ids.item() == 1
    assert torch.equal(nearest_anchors(torch.zeros(1, 2), anchors, 2).cosines, torch.zeros(1, 2, dtype=torch.float64))
    for states, table, k in ((anchors[0], anchors, 1), (anchors, anchors[:, :1], 1), (anchors, anchors, 3)):
        with pytest.raises(ValueError, match="expected"):
            nearest_anchors(states, table, k)
