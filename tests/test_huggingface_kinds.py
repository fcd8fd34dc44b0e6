"""Models that are not plain decoders: masked LMs, images and text, speech to text, encoder-decoders; and shared configs."""

import copy
from pathlib import Path
from typing import Any

import pytest
import sweep_transformers
import torch
import transformers
from huggingface_models import _BODY, D, V, build, difference, ids, logits
from machine import lacking
from torch import Tensor

import manifold_tying as mt
from manifold_tying.tying.huggingface import halves

_BERT = {name: _BODY[name] for name in _BODY if name not in ("num_key_value_heads", "tie_word_embeddings")}
_TEXT = {**_BODY, "head_dim": 8}
_IMAGES = {
    "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "image_size": 8, "patch_size": 4
}  # fmt: skip
_TWO_STACKS = {
    "vocab_size": V, "d_model": D, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": 2,
}  # fmt: skip

BIASED: dict[str, tuple[str, dict[str, Any]]] = {
    "BertLMHeadModel": ("BertConfig", {**_BERT, "is_decoder": True}),
    "BertForMaskedLM": ("BertConfig", _BERT),
    "RobertaForCausalLM": ("RobertaConfig", {**_BERT, "is_decoder": True}),
    "XLMRobertaForMaskedLM": ("XLMRobertaConfig", _BERT),
    "AlbertForMaskedLM": ("AlbertConfig", {**_BERT, "embedding_size": 8}),
}
MULTIMODAL: dict[str, tuple[str, dict[str, Any]]] = {
    "Gemma3ForConditionalGeneration": (
        "Gemma3Config",
        {"text_config": _TEXT, "vision_config": _IMAGES, "mm_tokens_per_image": 4, "tie_word_embeddings": True},
    ),
    "LlavaForConditionalGeneration": (
        "LlavaConfig",
        {
            "text_config": {**_TEXT, "model_type": "llama"},
            "vision_config": {**_IMAGES, "model_type": "clip_vision_model"},
            "image_token_id": 90,
            "tie_word_embeddings": True,
        },
    ),
}
SPEECH = {
    **_TWO_STACKS, "num_mel_bins": 8, "max_source_positions": 8, "max_target_positions": 64, "suppress_tokens": None,
    "begin_suppress_tokens": None,
}  # fmt: skip
ENCODER_DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "T5ForConditionalGeneration": (
        "T5Config",
        {"vocab_size": V, "d_model": D, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2, "pad_token_id": 0},
    ),
    "BartForConditionalGeneration": ("BartConfig", _TWO_STACKS),
    "PegasusForConditionalGeneration": ("PegasusConfig", _TWO_STACKS),
}


def make(kind: str, config: str, settings: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    model = getattr(transformers, kind)(getattr(transformers, config)(**settings)).eval()
    with torch.no_grad():
        table = model.get_input_embeddings().weight
        table.mul_(10 ** torch.linspace(0, 1, table.shape[1]))
        if (bias := model.get_output_embeddings().bias) is not None:
            bias.uniform_(-1, 1)
    return model


def computed(model: Any, **inputs: Tensor) -> Tensor:
    with torch.no_grad():
        return model(**(inputs or {"input_ids": ids()})).logits


def round_trip(model: Any, folder: Path, **inputs: Tensor) -> None:
    """Save, load and export of a converted model, whose function stays."""
    before = computed(model, **inputs)
    mt.save(model, folder / "saved")
    loaded: Any = mt.load(folder / "saved")
    kind: Any = model.__class__
    assert loaded.__class__ is kind and torch.equal(computed(loaded, **inputs), before)
    mt.export(model, folder / "exported")
    exported, report = kind.from_pretrained(folder / "exported", output_loading_info=True)
    assert not any(report.values()), report
    assert difference(computed(exported, **inputs), before) <= 1e-5


@pytest.mark.parametrize("kind", BIASED)
def test_a_head_whose_bias_has_two_names_keeps_it(kind: str, tmp_path: Path) -> None:
    model = make(kind, *BIASED[kind])
    before = computed(model)
    mt.convert(model, bridge=True)
    assert difference(computed(model), before) <= 1e-5
    round_trip(model, tmp_path)
    with pytest.warns(UserWarning, match=f"{V} -> {V + 4}"):
        model.resize_token_embeddings(V + 4)
    round_trip(model, tmp_path)


@pytest.mark.filterwarnings("ignore:gemma3:UserWarning")
@pytest.mark.parametrize("kind", MULTIMODAL)
def test_models_that_rename_their_weights_on_the_way(kind: str, tmp_path: Path) -> None:
    model = make(kind, *MULTIMODAL[kind])
    before = computed(model)
    mt.convert(model, bridge=True, memory="trainable")
    assert difference(computed(model), before) <= 1e-5
    round_trip(model, tmp_path)


def test_speech_to_text_is_loaded_as_what_it_is(tmp_path: Path) -> None:
    model = make("WhisperForConditionalGeneration", "WhisperConfig", SPEECH)
    inputs = {"input_features": torch.ones(2, 8, 16), "decoder_input_ids": ids()}
    before = computed(model, **inputs)
    mt.convert(model, bridge=True)
    assert difference(computed(model, **inputs), before) <= 1e-5
    round_trip(model, tmp_path, **inputs)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ENCODER_DECODERS)
def test_encoder_decoder_models_are_refused(kind: str, tied: bool) -> None:
    config, settings = ENCODER_DECODERS[kind]
    model = make(kind, config, {**settings, "tie_word_embeddings": tied})
    modules, before = list(model.modules()), copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"encoder\.embed_tokens.*encoder-decoder"):
        mt.convert(model, source=None if tied else "input")
    assert list(model.modules()) == modules
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_config_that_another_model_has_as_well_is_left_alone(tmp_path: Path) -> None:
    model, config = build(), build().config
    sibling, model = (model.__class__(config) for _ in range(2))
    was = config.to_dict()
    mt.convert(model)
    with pytest.warns(UserWarning, match="vocabulary"):
        model.resize_token_embeddings(V + 4)
    assert sibling.config is config and config.to_dict() == was
    assert model.config is model.model.config is model.model.layers[0].self_attn.config is not config
    sibling.save_pretrained(tmp_path)
    reloaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(reloaded), logits(sibling.eval()))
    text = make("LlavaForConditionalGeneration", *MULTIMODAL["LlavaForConditionalGeneration"])
    mt.convert(text)
    assert text.config.get_text_config() is text.model.language_model.config
    assert halves(text)


@pytest.mark.parametrize("kind", ["MistralLarge4ForConditionalGeneration", "SpeechT5ForSpeechToText"])
def test_names_and_parametrizations_of_a_models_own_survive(kind: str, tmp_path: Path) -> None:
    """One has its embedding in the file as tok_embeddings, the other a weight norm, which export leaves in place."""
    if (made := getattr(transformers, kind, None)) is None:
        lacking(f"this version of transformers has no {kind}")
    model = sweep_transformers.build(made)
    mt.convert(model, bridge=True)
    mt.save(model, tmp_path / "saved")
    state = mt.load(tmp_path / "saved").state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    mt.export(model, tmp_path / "exported")
    exported, report = made.from_pretrained(tmp_path / "exported", output_loading_info=True)
    assert not any(report.values()), report
    E, W_out = halves(model)[0].interface.materialize(torch.float32)
    torch.testing.assert_close(exported.get_input_embeddings().weight, E)
    torch.testing.assert_close(exported.get_output_embeddings().weight, W_out.T)
