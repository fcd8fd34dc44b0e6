"""What save and export write, where to, and what they leave alone."""

import errno
import os
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from hostile import tree
from huggingface_models import D, build, difference, logits
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

import manifold_tying as mt
from manifold_tying.cli import main
from manifold_tying.huggingface.checkpoint import write

# transformers 5.23 renames what PEFT 0.21 calls
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

LORA: dict[str, Any] = {"r": 2, "target_modules": ["q_proj"], "init_lora_weights": False}


def attached(model: Any) -> Any:
    model.add_adapter(peft.LoraConfig(**LORA))
    return model


def injected(model: Any) -> Any:
    return peft.get_peft_model(model, peft.LoraConfig(**LORA)).get_base_model()


@pytest.mark.parametrize(("writer", "adapt"), [(mt.save, attached), (mt.export, injected)])
def test_a_model_with_adapters_is_refused_and_the_folder_stays(writer: Any, adapt: Any, tmp_path: Path) -> None:
    writer(mt.convert(build()), tmp_path)
    before = tree(tmp_path)
    model = adapt(mt.convert(build()))
    with pytest.raises(ValueError, match="merge_and_unload"):
        writer(model, tmp_path)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("writer", [mt.save, mt.export])
def test_a_folder_with_an_adapter_is_refused_and_stays(writer: Any, tmp_path: Path) -> None:
    model: Any = peft.get_peft_model(mt.convert(build()), peft.LoraConfig(**LORA))
    model.save_pretrained(tmp_path)
    before = tree(tmp_path)
    with pytest.raises(ValueError, match="holds an adapter, which transformers would apply"):
        writer(model.merge_and_unload(), tmp_path)
    assert tree(tmp_path) == before


def test_nothing_goes_unless_new_weights_are_there(tmp_path: Path) -> None:
    write(build(), tmp_path)
    before = tree(tmp_path)
    with pytest.raises(ValueError, match=r"adapter_model\.safetensors"):
        write(attached(build()), tmp_path)  # save_pretrained writes the adapter alone
    assert tree(tmp_path) == before
    with pytest.raises(ValueError, match="is unchanged"):
        write(attached(build()), tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_files_that_are_not_the_checkpoint_stay(tmp_path: Path) -> None:
    model = mt.convert(build())
    model.save_pretrained(tmp_path, max_shard_size="8KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert torch.equal(logits(mt.load(tmp_path)), logits(model))
    own = {"model_notes.safetensors": b"1", "model-best.safetensors": b"2", "pytorch_model.notes.bin": b"3"}
    for name, content in own.items():
        (tmp_path / name).write_bytes(content)
    mt.save(model, tmp_path)
    expected = {"config.json", "generation_config.json", "model.safetensors", *own}
    assert {file.name for file in tmp_path.iterdir()} == expected
    assert {name: (tmp_path / name).read_bytes() for name in own} == own


@pytest.fixture
def other_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that files cannot be moved into from outside, as the place where a disk is mounted."""
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    replace = os.replace

    def checked(source: Any, target: Any) -> None:
        if (mounted in Path(source).resolve().parents) != (mounted in Path(target).resolve().parents):
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        replace(source, target)

    monkeypatch.setattr(os, "replace", checked)
    return mounted


@pytest.mark.parametrize("linked", [False, True])
def test_mount_points_and_links_can_be_written_to(linked: bool, other_file_system: Path, tmp_path: Path) -> None:
    target = other_file_system
    if linked:
        target = tmp_path / "link"
        target.symlink_to(other_file_system / "inside")
    model = mt.convert(build())
    mt.save(model, target)
    assert torch.equal(logits(mt.load(target)), logits(model))
    mt.export(model, target)
    assert difference(logits(AutoModelForCausalLM.from_pretrained(target)), logits(model)) <= 1e-5
    assert {file.name for file in target.iterdir()} == {"config.json", "generation_config.json", "model.safetensors"}


def test_a_save_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = mt.convert(build())
    mt.save(model, tmp_path / "old")
    before = tree(tmp_path / "old")
    save_pretrained = PreTrainedModel.save_pretrained

    def nothing(self: Any, folder: Path) -> None:
        save_pretrained(self, folder)
        (folder / "model.safetensors").unlink()

    def full(self: Any, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    for broken, error in ((nothing, "to write model.safetensors"), (full, "No space")):
        monkeypatch.setattr(PreTrainedModel, "save_pretrained", broken)
        for folder in ("old", "new"):
            with pytest.raises((ValueError, OSError), match=error):
                mt.save(model, tmp_path / folder)
        assert tree(tmp_path / "old") == before and not (tmp_path / "new").exists()


@pytest.mark.skipif(transformers.__version__ == "5.0.0", reason="it cannot sort weight.original and weight.0.form")
def test_constraints_on_single_layers_can_be_written_as_plain_weights(tmp_path: Path) -> None:
    model = build()
    mt.stiefel(model.model.layers[0].mlp.up_proj)
    mt.orthogonal(model.model.layers[0].self_attn.q_proj)
    mt.spd(model.model.layers[0].self_attn.o_proj, "weight")
    mt.equivalence(model.model.layers[0].mlp.down_proj)
    mt.poet.keep_plain_weights(model)
    model.save_pretrained(tmp_path)
    assert difference(logits(type(model).from_pretrained(tmp_path)), logits(model)) <= 1e-6
    model.load_state_dict(model.state_dict())


def test_tensors_that_a_class_has_no_place_for_are_left_out_with_a_warning(tmp_path: Path) -> None:
    build().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    attention = "model.layers.0.self_attn"
    masks = {f"{attention}.bias": torch.ones(1, 1, 8, 8).tril().bool(), f"{attention}.masked_bias": torch.tensor(-1e9)}
    masks["model.embed_tokens.position_ids"] = torch.arange(8)  # as early versions of transformers saved them
    save_file(load_file(file) | masks | {"pooler.weight": torch.zeros(2, 2)}, file, {"format": "pt"})
    with pytest.warns(
        UserWarning, match="LlamaForCausalLM has no place for .*position_ids, .*masked_bias, pooler.weight"
    ):
        main(["convert", str(tmp_path), str(tmp_path / "out")])
    assert mt.load(tmp_path / "out").lm_head is not None


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.bias", "model.layers.7.mlp.up_proj.weight"])
def test_a_weight_of_a_layer_is_never_left_out(name: str, tmp_path: Path) -> None:
    build().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {name: torch.ones(D)}, file, {"format": "pt"})
    with pytest.raises(SystemExit):
        main(["convert", str(tmp_path), str(tmp_path / "out")])


def test_another_module_called_as_the_embedding_is_no_table(tmp_path: Path) -> None:
    model: Any = mt.convert(build())
    model.vision = torch.nn.ModuleDict({"embed_tokens": torch.nn.Embedding(3, 4)})
    mt.save(model, tmp_path)
    assert load_file(tmp_path / "model.safetensors")["vision.embed_tokens.weight"].shape == (3, 4)
