"""Make small changes to the numerical packages at random, and say how many the tests notice.

The changes are those of cosmic-ray, so many at distinct places of each file, with a seed. A first run records by coverage which
tests execute which line. Then up to a hundred of these run for each change, in a process forked from this one, which has loaded
PyTorch; those of its package come first, then the laws. A test that takes three minutes has noticed.
`survivors.toml` lists changes that nothing can or need notice. Exit status 1 if others survive.

    make mutation
    make mutation MUTATION="poet/spec.py --mutants 30 --seed 1"
"""

import argparse
import ast
import contextlib
import gc
import importlib
import os
import random
import shutil
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import coverage
import pytest
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import MutationVisitor
from cosmic_ray.operators.provider import OperatorProvider
from run import COPIED, ROOT

PACKAGES = ("linalg", "manifolds", "optim", "parametrizations", "poet", "tying")
TESTS = [f"tests/unit/{name}" for name in (*PACKAGES, "kernels", "models", "diagnostics") if name != "poet"]
TESTS += [f"tests/unit/training/test_{name}.py" for name in ("drift", "plain_baselines", "poet_trainer")]
TESTS += ["tests/huggingface/test_peft_poet.py", "tests/invariants"]
# cosmic-ray replaces each operator by each other one; tensors of floats have none of these
FOREIGN = ("_Is", "_IsNot", "_LShift", "_RShift", "_BitOr", "_BitAnd", "_BitXor")


class _Contexts:
    def __init__(self, measure: coverage.Coverage) -> None:
        self.measure = measure

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self.measure.switch_context(item.nodeid.split("[")[0])


def passed(folder: Path, tests: list[str], measure: coverage.Coverage | None = None) -> bool:
    if child := os.fork():
        return os.waitpid(child, 0)[1] == 0
    os.chdir(folder)
    os.environ["PYTHONPATH"] = sys.path[0] = str(folder)
    log = os.open("log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1), os.dup2(log, 2)
    patience = ("-o", "faulthandler_timeout=180", "-o", "faulthandler_exit_on_timeout=true")
    with measure.collect() if measure else contextlib.nullcontext():
        plugins = [_Contexts(measure)] if measure else []
        status = pytest.main(["-xq", "--assert=plain", "-p", "no:cacheprovider", *patience, *tests], plugins=plugins)
    if measure:
        measure.save()
    os._exit(int(status))


def mutants(text: str, number: int, seed: str) -> list[tuple[int, str]]:
    """Lines and changed texts, outside of messages and annotations."""
    tree, nodes = list(ast.walk(ast.parse(text))), list(ast_nodes(get_ast(text)))
    silent: list[Any] = [n for n in tree if isinstance(n, ast.Raise | ast.JoinedStr) or "warn(" in ast.unparse(n)[:14]]
    silent += [part for n in tree for name in ("annotation", "returns") if (part := getattr(n, name, None))]
    spans = [((n.lineno, n.col_offset), (n.end_lineno, n.end_col_offset)) for n in silent]
    places: dict[tuple, list[tuple]] = {}
    for name in OperatorProvider():
        if name.endswith(FOREIGN) or (operator := OperatorProvider()[name]).arguments():
            continue
        for occurrence, place in enumerate(p for node in nodes for p in operator().mutation_positions(node)):
            if not any(begin <= place[0] < end for begin, end in spans):
                places.setdefault(place, []).append((operator(), occurrence))
    chance, made = random.Random(seed), list[tuple[int, str]]()
    for place in chance.sample(sorted(places), len(places)):
        mutant = MutationVisitor.mutate_code(text, *chance.choice(places[place]))
        with contextlib.suppress(SyntaxError):
            compile(mutant, "", "exec")
            made.append((place[0][0], mutant))
        if len(made) == number:
            break
    return sorted(made)


def tests_of(contexts: Iterable[str], file: Path, line: str, executed: bool) -> list[str]:
    package = f"unit/{file.parent.name}/".replace("poet", "parametrizations")
    turn = Counter[str]()  # one test of each file comes before another of the same
    order = []
    for t in sorted(filter(None, contexts)):
        turn[path := t.split("::")[0]] += 1
        order.append((package not in t, file.stem.strip("_") not in t, "invariants" not in t, turn[path], t))
    also = ["tests/unit/test_public_api.py"]  # coverage sees neither defaults nor other processes
    sharded = file.name in ("_parallel.py", "_vocabulary.py", "rules.py") or "reduce" in line or "distributed" in line
    if sharded or not executed:
        also.append("tests/processes/test_distributed.py")
    return [key[-1] for key in sorted(order)[:100]] + also


def attack(folder: Path, measure: coverage.Coverage, file: str, number: int, seed: int) -> Iterator[tuple]:
    """The line before and after, and whether the tests notice, for each mutant of the file."""
    path = folder / "manifold_tying" / file
    text, lines = path.read_text("utf-8"), measure.get_data().contexts_by_lineno(str(path))
    for line, mutant in mutants(text, number, f"{seed} {file}"):
        # of what runs at import, or in other processes alone, all tests of the file
        executed = any(lines.get(line, ()))
        contexts = lines[line] if executed else {c for contexts in lines.values() for c in contexts}
        path.write_text(mutant, "utf-8")
        noticed = not passed(folder, tests_of(contexts, Path(file), text.splitlines()[line - 1], executed))
        path.write_text(text, "utf-8")
        pairs = zip(text.splitlines(), [*mutant.splitlines(), ""], strict=False)
        yield noticed, *next((old.strip(), new.strip()) for old, new in pairs if old != new)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="below manifold_tying; all of these packages by default")
    parser.add_argument("--mutants", type=int, default=9, help="of each file")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    package = ROOT / "manifold_tying"
    files = chosen.files or [f"{p}/{file.name}" for p in PACKAGES for file in sorted((package / p).glob("*.py"))]
    listed = tomllib.loads(Path(__file__).with_name("survivors.toml").read_text("utf-8")).values()
    for name in ("geoopt", "hypothesis.stateful", "lightning.pytorch", "torch._dynamo", "transformers.trainer"):
        importlib.import_module(name)  # what many tests need, before the forks
    gc.freeze()
    known, killed, made, new = {(s["file"], s["old"], s["new"]) for s in listed}, Counter[str](), Counter[str](), 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in COPIED:
            (shutil.copytree if (ROOT / part).is_dir() else shutil.copy)(ROOT / part, folder / part)
        measure = coverage.Coverage(folder / "lines", source=[str(folder / "manifold_tying")])
        if not passed(folder, TESTS, measure):
            sys.exit("the tests fail:\n" + (folder / "log").read_text()[-3000:])
        measure.load()
        for file in files:
            for noticed, old, change in attack(folder, measure, file, chosen.mutants, chosen.seed):
                for group in (file, file.split("/")[0], "all"):
                    made[group] += 1
                    killed[group] += noticed
                if not noticed and (file, old, change) not in known:
                    new += 1
                    print(f"[]\nfile = \"{file}\"\nold = '{old}'\nnew = '{change}'\nreason = \"\"\n", flush=True)
            print(f"# {file}: {killed[file]} of {made[file]}", flush=True)
    for group in (*dict.fromkeys(file.split("/")[0] for file in files), "all"):
        print(f"# {group}: {killed[group]} of {made[group]}")
    return int(new > 0)


if __name__ == "__main__":
    sys.exit(main())
