"""A conversion is run on a few tokens before it is kept: what does not run, or rotates into another function, is put back."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from huggingface_models import (
    _BERT,
    _BODY,
    ENCODER_DECODERS,
    V,
    build,
    difference,
    ids,
    interface,
    logits,
    make,
    round_trip,
    stays_as_it_was,
)
from torch import nn

import manifold_tying as mt

FIRST = transformers.__version__ == "5.0.0"


class ReadsItsTable(transformers.LlamaForCausalLM):
    """Looks up rows of the embedding's weight and does not call it."""

    def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:
        return super().forward(inputs_embeds=F.embedding(input_ids, self.model.embed_tokens.weight), **kwargs)


class ProjectsBeforeItsHead(transformers.LlamaForCausalLM):
    """Blocks as in Llama, and a linear layer between the final norm and the head."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.between = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:
        hidden = self.between(self.model(input_ids, **kwargs).last_hidden_state)
        return transformers.modeling_outputs.CausalLMOutput(logits=self.lm_head(hidden))


def untied_from_llama(kind: Any) -> Any:
    torch.manual_seed(0)
    model = kind(transformers.LlamaConfig(**_BODY)).eval()
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(10 ** torch.linspace(0, 1, 16))
    return model


def ultrabert() -> Any:
    return make("UltrabertForMaskedLM", "UltrabertConfig", {**_BODY, "prediction_head_size": 24})


def shares_its_blocks() -> Any:
    model = build()
    model.model.layers[1].mlp = model.model.layers[0].mlp
    with torch.no_grad():
        for weight in model.model.layers[0].mlp.parameters():
            weight.mul_(20)  # as drawn, the blocks add next to nothing to the residual stream
    return model


def learns_positions() -> Any:
    """Something is added to the residual stream that is not rotated."""
    model = build()
    model.model.layers[0].register_forward_pre_hook(lambda module, given: (given[0] + torch.ones(16), *given[1:]))
    return model


def test_a_model_that_computes_with_its_table_is_refused() -> None:
    stays_as_it_was(untied_from_llama(ReadsItsTable), "reads the weight of its embedding")


@pytest.mark.parametrize(
    "make_model",
    [
        pytest.param(ultrabert, id="ultrabert", marks=pytest.mark.skipif(FIRST, reason="not in transformers 5.0.0")),
        pytest.param(lambda: untied_from_llama(ProjectsBeforeItsHead), id="projection"),
        pytest.param(shares_its_blocks, id="shared blocks"),
        pytest.param(learns_positions, id="positions"),
    ],
)
def test_a_body_that_does_not_turn_is_not_rotated(make_model: Any) -> None:
    stays_as_it_was(make_model(), "where it cannot be rotated", transform="rotation")
    mt.convert(make_model())  # the control: nothing else is the matter with them


def uneven(dtype: torch.dtype, scale: float = 1.0) -> Any:
    model = build()
    with torch.no_grad():
        model.model.norm.weight.copy_(torch.linspace(0.5, 2, 16))
        model.get_input_embeddings().weight.mul_(scale)
    return model.to(dtype)


def test_a_final_gain_that_is_uneven_is_no_reason_to_refuse() -> None:
    model = uneven(torch.float16)
    before = logits(model)
    rotated = mt.convert(model, transform="rotation")
    assert difference(logits(rotated), before) > 1e-2  # what the documentation says is lost


def test_a_gain_beyond_the_range_of_float16_is_refused() -> None:
    stays_as_it_was(uneven(torch.float16, 300.0), r"float16.*bfloat16", transform="rotation")
    for dtype in (torch.bfloat16, torch.float32):
        model = mt.convert(uneven(dtype, 300.0), transform="rotation")
        assert model.model.norm.weight.isfinite().all() and logits(model).isfinite().all()


def test_a_model_that_runs_on_nothing_we_have_is_converted_as_before() -> None:
    model = build()
    model.register_forward_pre_hook(lambda module, given: 1 / 0)
    mt.convert(model)  # it fails with its own tables just so


def test_a_head_that_is_joined_to_another_matrix_gets_its_weight(tmp_path: Any) -> None:
    settings = {**_BERT, "hidden_size": 32, "embedding_size": 16, "intrabottleneck_size": 16}
    model = make("MobileBertForMaskedLM", "MobileBertConfig", settings)
    round_trip(mt.convert(model), tmp_path)


@pytest.mark.skipif(FIRST, reason="from_pretrained of transformers 5.0.0 fails on Apertus, converted or not")
def test_apertus_is_exported_after_a_save(tmp_path: Any) -> None:
    settings = {**_BODY, "num_key_value_heads": 2}
    round_trip(mt.convert(make("ApertusForCausalLM", "ApertusConfig", settings)), tmp_path)


class HasNoTable(transformers.LlamaForCausalLM):
    """As models of sound and of characters."""

    def get_input_embeddings(self) -> Any:
        raise NotImplementedError("there is none")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (HasNoTable, "has None"),
        (transformers.LlamaForSequenceClassification, "has no head"),
    ],
)
def test_tables_that_a_model_does_not_give_away_are_refused(kind: Any, message: str) -> None:
    stays_as_it_was(kind(transformers.LlamaConfig(**_BODY)), message)


class Unties(transformers.LlamaForCausalLM):
    """As joined models of two parts do."""

    def __init__(self, config: Any) -> None:
        if hasattr(config, "manifold_tying"):
            config.tie_word_embeddings = False
        super().__init__(config)


def test_a_model_that_would_not_load_again_is_refused() -> None:
    stays_as_it_was(untied_from_llama(Unties), "could not be loaded again")


@pytest.mark.parametrize(
    ("kind", "tied"), [("T5ForConditionalGeneration", True), ("BartForConditionalGeneration", False)]
)
def test_encoder_decoder_models_are_refused(kind: str, tied: bool) -> None:
    config, settings = ENCODER_DECODERS[kind]
    model = make(kind, config, {**settings, "tie_word_embeddings": tied})
    stays_as_it_was(model, r"encoder\.embed_tokens.*encoder-decoder", source=None if tied else "input")


def test_an_embedding_that_is_not_torchs_is_refused() -> None:
    stays_as_it_was(make("IBertForMaskedLM", "IBertConfig", _BERT), "an nn.Embedding.*QuantEmbedding")


def test_a_table_of_as_many_positions_as_tokens_is_no_second_table_of_tokens() -> None:
    model = build("GPT-2", n_positions=V)
    assert interface(mt.convert(model)).table is not model.transformer.wpe.weight


def test_a_second_table_of_tokens_of_its_own_stays_as_it_is() -> None:
    model = build()
    model.second = nn.Embedding(V, 16)
    before = model.second(ids())
    assert interface(mt.convert(model)) and torch.equal(model.second(ids()), before)


def test_conversion_losses_take_labels_and_embeddings_alone() -> None:
    model = build()
    e = model.get_input_embeddings()(ids()).detach()
    labels = {"labels": ids()}
    losses = mt.conversion_losses(model, {"inputs_embeds": e, **labels})
    assert losses["source"] == pytest.approx(mt.conversion_losses(model, {"input_ids": ids()})["source"], rel=1e-6)
    assert losses["head"] == pytest.approx(losses["source"], rel=1e-5)  # the embedding is not used
    assert "rotation" not in losses  # it would need other embeddings
    with pytest.raises(ValueError, match="labels"):
        mt.conversion_losses(model, {"inputs_embeds": e})
