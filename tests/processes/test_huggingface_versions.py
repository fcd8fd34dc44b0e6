"""transformers that is too old or broken: `import manifold_tying` never harms it, and our functions say what to do."""

import os
import subprocess
import sys
from pathlib import Path

from machine import lacking

import manifold_tying as mt

ROOT = str(Path(mt.__file__).parent.parent)
OLD = ("transformers==4.57.1", "huggingface_hub<1", "tokenizers<0.23", "requests", "charset-normalizer")


def run(program: str, folder: Path) -> str:
    path = os.pathsep.join([str(folder), ROOT])
    environment = os.environ | {"PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_an_old_transformers_works_and_a_conversion_names_the_version(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--target", str(tmp_path)]
    if subprocess.run([*pip, *OLD], capture_output=True).returncode:
        lacking("pip finds no transformers 4.57")
    said = run(
        """
import manifold_tying as mt
import torch
from transformers import LlamaConfig, LlamaForCausalLM
sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
model = LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes))
before = dict(model.named_modules())
for use in (lambda: mt.convert(model), lambda: mt.load("nowhere")):
    try:
        use()
    except ModuleNotFoundError as error:
        print(error)
assert dict(model.named_modules()) == before
assert model(torch.arange(4)[None]).logits.shape == (1, 4, 32)
""",
        tmp_path,
    )
    assert said.count("expected transformers >= 5.0, found 4.57.1") == 2
    assert "Cannot register" not in said


def test_a_transformers_that_we_cannot_register_with_still_imports(tmp_path: Path) -> None:
    """New enough by its number, without what we need."""
    package = tmp_path / "transformers"
    (package / "quantizers").mkdir(parents=True)
    (package / "__init__.py").write_text("__version__ = '5.99.0'\nfrom transformers import modeling_utils\n")
    (package / "modeling_utils.py").write_text("from transformers.quantizers import auto\n")
    (package / "quantizers" / "__init__.py").touch()
    (package / "quantizers" / "auto.py").touch()
    said = run("import manifold_tying\nimport transformers\nprint('imported')", tmp_path)
    assert "imported" in said and said.count("Cannot register converted models") == 1
