"""transformers that is missing, too old or broken: `import manifold_tying` never harms it, and our functions say what to do."""

import os
import subprocess
import sys
from pathlib import Path

import manifold_tying as mt

ROOT = str(Path(mt.__file__).parent.parent)

# The parts of transformers that matter here: a version, a model, and a table of quantizers without our names.
OLD = {
    "__init__.py": (
        "import torch\n__version__ = {version!r}\n"
        "class PreTrainedModel(torch.nn.Module):\n    pass\n"
        "class LlamaForCausalLM(PreTrainedModel):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.embed_tokens = torch.nn.Embedding(32, 4)\n"
        "        self.lm_head = torch.nn.Linear(4, 32, bias=False)\n"
        "        self.lm_head.weight = self.embed_tokens.weight\n"
        "    def get_input_embeddings(self): return self.embed_tokens\n"
        "    def set_input_embeddings(self, value): self.embed_tokens = value\n"
        "    def get_output_embeddings(self): return self.lm_head\n"
        "    def set_output_embeddings(self, value): self.lm_head = value\n"
        "from transformers.quantizers import auto\n"
    ),
    "quantizers/__init__.py": "",
    "quantizers/auto.py": "AUTO_QUANTIZER_MAPPING = {{}}\n",
}


def fake(folder: Path, version: str) -> None:
    for name, text in OLD.items():
        file = folder / "transformers" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text.format(version=version))


def run(program: str, *folders: Path) -> str:
    path = os.pathsep.join([*map(str, folders), ROOT])
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


USE = """
import manifold_tying as mt
from transformers import LlamaForCausalLM
model = LlamaForCausalLM()
before = dict(model.named_modules())
for use in (lambda: mt.convert(model), lambda: mt.load("nowhere")):
    try:
        use()
    except ModuleNotFoundError as error:
        print(error)
assert dict(model.named_modules()) == before
"""


def test_an_old_transformers_imports_and_a_conversion_names_the_version(tmp_path: Path) -> None:
    fake(tmp_path, "4.57.1")
    said = run(f"import transformers\n{USE}", tmp_path)
    assert said.count("expected transformers >= 5.0, found 4.57.1") == 2
    assert "Cannot register" not in said


def test_a_transformers_that_we_cannot_register_with_still_imports(tmp_path: Path) -> None:
    fake(tmp_path, "5.99.0")  # new enough by its number, without what we need
    said = run("import manifold_tying\nfrom transformers import LlamaForCausalLM\nprint('imported')", tmp_path)
    assert "imported" in said and said.count("Cannot register converted checkpoints") == 1
