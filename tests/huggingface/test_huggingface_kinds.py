"""Models that are not plain decoders: masked LMs, images and text, speech to text, encoder-decoders; and shared configs."""

from pathlib import Path
from typing import Any

import pytest
import sweep_transformers
import torch
import transformers
from huggingface_models import (
    BIASED,
    MULTIMODAL,
    SPEECH,
    V,
    build,
    computed,
    difference,
    ids,
    interface,
    logits,
    make,
    round_trip,
)
from machine import lacking

import manifold_tying as mt
from manifold_tying.huggingface.native import is_guard

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    **{kind: BIASED[kind] for kind in ("BertLMHeadModel", "AlbertForMaskedLM")},
    **MULTIMODAL,
    "WhisperForConditionalGeneration": ("WhisperConfig", SPEECH),
}


@pytest.mark.filterwarnings("ignore:gemma3:UserWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_are_converted_saved_loaded_and_exported(kind: str, tmp_path: Path) -> None:
    """Heads whose bias has two names, models that rename their weights on the way, speech to text."""
    model = make(kind, *KINDS[kind])
    speech = {"input_features": torch.ones(2, 8, 16), "decoder_input_ids": ids()}
    inputs = speech if kind.startswith("Whisper") else {}
    before = computed(model, **inputs)
    mt.convert(model)
    assert difference(computed(model, **inputs), before) > 1e-4
    round_trip(model, tmp_path, **inputs)
    if kind in BIASED:
        with pytest.warns(UserWarning, match=f"{V} -> {V + 4}"):
            model.resize_token_embeddings(V + 4)
        round_trip(model, tmp_path)


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
    assert interface(text)


def test_the_text_part_saved_alone_still_divides(tmp_path: Path) -> None:
    model = mt.convert(make("LlavaForConditionalGeneration", *MULTIMODAL["LlavaForConditionalGeneration"]))
    part, tokens = model.model.language_model, ids()
    expected = part(tokens).last_hidden_state
    part.save_pretrained(tmp_path)
    assert is_guard(transformers.AutoConfig.from_pretrained(tmp_path).quantization_config)
    again = transformers.AutoModel.from_pretrained(tmp_path)
    assert torch.equal(again(tokens).last_hidden_state, expected)
    mt.export(model, tmp_path / "exported")
    stock = type(model).from_pretrained(tmp_path / "exported")
    assert difference(stock.model.language_model(tokens).last_hidden_state, expected) <= 1e-5


@pytest.mark.parametrize("kind", ["MistralLarge4ForConditionalGeneration", "SpeechT5ForSpeechToText"])
def test_names_and_parametrizations_of_a_models_own_survive(kind: str, tmp_path: Path) -> None:
    """One has its embedding in the file as tok_embeddings, the other a weight norm, which export leaves in place."""
    if (made := getattr(transformers, kind, None)) is None:
        lacking(f"this version of transformers has no {kind}")
    model = sweep_transformers.build(made)
    mt.convert(model)
    mt.save(model, tmp_path / "saved")
    state = mt.load(tmp_path / "saved").state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    mt.export(model, tmp_path / "exported")
    exported, report = made.from_pretrained(tmp_path / "exported", output_loading_info=True)
    assert not any(report.values()), report
    E, W_out = interface(model).materialize(torch.float32)
    torch.testing.assert_close(exported.get_input_embeddings().weight, E)
    torch.testing.assert_close(exported.get_output_embeddings().weight, W_out.T)


@pytest.mark.parametrize(("outcome", "status"), [("refused", 0), ("wrong", 1), ("crashed", 1)])
def test_the_sweep_fails_where_a_class_does(outcome: str, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_transformers, "sweep", lambda names, jobs: [(names[0], outcome, "why")])
    for name in ("set_verbosity_error", "disable_progress_bar"):
        monkeypatch.setattr(transformers.logging, name, lambda: None)
    with pytest.raises(SystemExit) as ended:
        sweep_transformers.main()
    assert ended.value.code == status


@pytest.mark.filterwarnings("ignore:.* had two tables; kept the input table:UserWarning")
def test_the_sweep_keeps_one_table_of_two(tmp_path: Path) -> None:
    """Of a model that renames its modules when it is saved."""
    if getattr(transformers, kind := "BailingHybridForCausalLM", None) is None:
        lacking(f"this version of transformers has no {kind}")
    assert sweep_transformers.try_class(kind, tmp_path) == ("converted", "from the input's table")
