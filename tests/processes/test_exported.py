"""Programs of torch.export run, with the same values, where this package is not installed."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import manifold_tying as mt

ELSEWHERE = """
import sys, torch
class Blocked:
    def find_spec(self, name, *_):
        assert not name.startswith("manifold_tying"), name
sys.meta_path.insert(0, Blocked())
x, expected = torch.load(sys.argv[1] + "/values.pt")
for name, y in expected.items():
    program = torch.export.load(f"{sys.argv[1]}/{name}.pt2").module()
    torch.testing.assert_close(program(x), y, rtol=1e-5, atol=1e-6, msg=lambda text: name + text)
assert not any(name.startswith("manifold_tying") for name in sys.modules)
"""

CONSTRAINTS: dict[str, Any] = {
    **{
        name: lambda layer, name=name: mt.orthogonal(layer, map=name)
        for name in ("polar", "qr", "cayley", "cayley-neumann")
    },
    "stiefel": mt.stiefel,
    "equivalence": lambda layer: mt.equivalence(layer, block_size=4),
}


# torch's own, where it traces an autograd.Function
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_an_exported_layer_runs_without_the_package(tmp_path: Path) -> None:
    x, expected = torch.randn(3, 8), {}
    for name, constrain in CONSTRAINTS.items():
        model = nn.Sequential(constrain(nn.Linear(8, 16)))
        exported = torch.export.export(model, (x,))
        program = exported.module()
        for run in (model, program):  # a fresh polar layer has equal singular values
            run(x).pow(3).sum().backward()
        for trained, eager in zip(program.parameters(), model.parameters(), strict=True):
            assert trained.grad is not None and eager.grad is not None
            torch.testing.assert_close(trained.grad, eager.grad, rtol=1e-4, atol=1e-5)
        if name != "stiefel":
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(torch.randn_like(p), alpha=0.3)
        exported.state_dict.update(model.named_parameters())
        torch.export.save(exported, tmp_path / f"{name}.pt2")
        expected[name] = model(x).detach()
    torch.save((x, expected), tmp_path / "values.pt")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [sys.executable, "-c", ELSEWHERE, str(tmp_path)]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
