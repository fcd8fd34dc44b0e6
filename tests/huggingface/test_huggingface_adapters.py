"""PEFT on a converted model: its own ways to adapt the body and to train the table, and what it refuses."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from huggingface_models import D, Repeated, V, arguments, build, difference, ids, interface, logits
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, Trainer

import manifold_tying as mt

# transformers 5.23 renames what PEFT 0.21 calls
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

BOTH = {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}


def adapted(**options: Any) -> Any:
    """Drawn from the same seed each time, adapters included."""
    model = mt.convert(build())
    torch.manual_seed(1)
    return peft.get_peft_model(model, peft.LoraConfig(r=2, task_type="CAUSAL_LM", **options))


def trained(lora: Any, out: Path, resume: str | None = None) -> Any:
    Trainer(lora, arguments(out, 10), train_dataset=Repeated()).train(resume_from_checkpoint=resume)
    return lora.eval()


def test_lora_on_the_body_trains_merges_saves_and_exports(tmp_path: Path) -> None:
    lora = adapted(target_modules="all-linear")
    before = logits(lora)
    names = [name for name, p in lora.named_parameters() if p.requires_grad]
    assert names and all("layers" in name for name in names)  # neither the embedding nor the head
    after = logits(trained(lora, tmp_path / "run"))
    assert difference(after, before) > 1e-3
    again = peft.PeftModel.from_pretrained(mt.convert(build()), tmp_path / "run" / "checkpoint-10").eval()
    assert difference(logits(again), after) <= 1e-5
    merged = lora.merge_and_unload()
    mt.save(merged, tmp_path / "saved")
    assert difference(logits(mt.load(tmp_path / "saved")), after) <= 1e-5
    mt.export(merged, tmp_path / "exported")
    assert difference(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "exported")), after) <= 1e-5


def test_the_table_trains_with_the_adapters_is_saved_with_them_and_stays_tied(tmp_path: Path) -> None:
    lora = adapted(target_modules=["q_proj"], **BOTH)
    trained(lora, tmp_path / "run")
    W = lora.get_base_model().lm_head.weight
    assert difference(W, build().lm_head.weight) > 1e-2  # the control: it has moved
    tensors = load_file(tmp_path / "run" / "checkpoint-10" / "adapter_model.safetensors")
    assert any(torch.equal(tensor, W) for tensor in tensors.values())
    again = peft.PeftModel.from_pretrained(mt.convert(build()), tmp_path / "run" / "checkpoint-10").eval()
    assert difference(logits(again), logits(lora)) <= 1e-6
    resumed = trained(
        adapted(target_modules=["q_proj"], **BOTH), tmp_path / "run", str(tmp_path / "run" / "checkpoint-5")
    )
    assert difference(logits(resumed), logits(lora)) <= 1e-5
    after, merged = logits(lora), lora.merge_and_unload()
    E, W_out = interface(merged).materialize()
    torch.testing.assert_close(W_out @ E, torch.eye(D), rtol=0, atol=1e-4)
    mt.save(merged, tmp_path / "merged")
    assert difference(logits(mt.load(tmp_path / "merged")), after) <= 1e-5


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
@pytest.mark.filterwarnings("ignore:Input and output embeddings are no longer tied:UserWarning")
def test_a_table_that_came_apart_is_not_saved(tmp_path: Path) -> None:
    apart = adapted(target_modules=["q_proj"], modules_to_save=["embed_tokens"])
    trained(apart, tmp_path / "run")
    merged = apart.merge_and_unload()
    for save in (mt.save, type(merged).save_pretrained):
        with pytest.raises(ValueError, match="another weight than its embedding"):
            save(merged, tmp_path / "merged")
    merged.set_input_embeddings(nn.Embedding(V, D))
    with pytest.raises(ValueError, match="given another embedding"):
        merged.save_pretrained(tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


@pytest.mark.filterwarnings("ignore:Model (has|with) `tie_word_embeddings=True`:UserWarning")
@pytest.mark.parametrize(
    "options", [{"trainable_token_indices": [3], "target_modules": ["q_proj"]}, {"target_modules": ["embed_tokens"]}]
)
def test_adapters_on_rows_of_the_table_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"reads rows of its weight W.*ensure_weight_tying"):
        adapted(**options)(input_ids=ids())


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad:UserWarning")
@pytest.mark.parametrize("kind", [peft.PromptTuningConfig, peft.PrefixTuningConfig])
def test_prompt_methods_train_save_and_load(kind: Any, tmp_path: Path) -> None:
    tuned = peft.get_peft_model(mt.convert(build()), kind(task_type="CAUSAL_LM", num_virtual_tokens=2)).eval()
    before = logits(tuned)
    tuned(input_ids=ids(), labels=ids()).loss.backward()
    with torch.no_grad():
        for p in tuned.parameters():
            if p.requires_grad:
                p.sub_(p.grad.sign() * 0.5)
    after = logits(tuned)
    assert difference(after, before) > 1e-4
    tuned.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(mt.convert(build()), tmp_path).eval()
    assert difference(logits(again), after) <= 1e-5


def test_an_adapter_names_the_converted_checkpoint_as_its_base(tmp_path: Path) -> None:
    build().save_pretrained(tmp_path / "stock")
    model = mt.convert(AutoModelForCausalLM.from_pretrained(tmp_path / "stock"))
    config: dict[str, Any] = {"target_modules": ["q_proj"], "task_type": "CAUSAL_LM", "init_lora_weights": False}
    with pytest.warns(UserWarning, match="and not saved"):  # PEFT's, which names the base
        peft.get_peft_model(model, peft.LoraConfig(**config)).save_pretrained(str(tmp_path / "adapter"))
    with pytest.raises(OSError, match=r"not saved: call manifold_tying\.save"):  # not the stock model in silence
        peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    model = mt.convert(AutoModelForCausalLM.from_pretrained(tmp_path / "stock"))
    mt.save(model, tmp_path / "converted")
    for base in (model, AutoModelForCausalLM.from_pretrained(tmp_path / "converted")):
        lora = peft.get_peft_model(base, peft.LoraConfig(**config))
        lora.save_pretrained(str(tmp_path / "adapter"))
        again = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter").eval()
        assert difference(logits(again), logits(lora.eval())) <= 1e-6
