"""The command line: manifold-tying train | ablate | reproduce | report | sample | convert | export | inspect."""

import importlib
import io
import os
import signal
import sys
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType

from manifold_tying._extra import needs_extra

COMMANDS = {
    "train": "Train one model.",
    "ablate": "Train several arms on the same data and compare them.",
    "reproduce": "Run one of the papers' comparisons; needs a checkout.",
    "report": "Draw the curves of ablations and runs on one page.",
    "sample": "Continue a text with the model of a run.",
    "convert": "Replace the tied tables of a transformers checkpoint with a PIT interface.",
    "export": "Write a converted checkpoint as a stock one, or a run's weights as one file.",
    "inspect": "Show a saved model's token interface.",
}
_LISTED = "\n".join(f"  {name:9}  {what}" for name, what in COMMANDS.items())
HELP = f"""\
usage: manifold-tying COMMAND [-h] ...

{_LISTED}

manifold-tying COMMAND --help lists a command's options.
Models (--preset): bytes, nano and mini for a CPU; pit-0.3b, pit-0.6b, pit-1.2b; poet-60m, poet-130m, poet-350m, poet-1.3b;
galore-60m, galore-130m, galore-350m, galore-1.3b.
"""


def main(arguments: list[str] | None = None) -> None:
    """Run a command line. Prints errors that the user can fix (ValueError, OSError, a missing package); exit status 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # not every encoding has Δ
    name, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    try:
        if name in ("-h", "--help"):
            print(HELP, end="", flush=True)
        elif name in COMMANDS:
            _run(name, rest)
        else:
            near = "".join(f"; did you mean {known}?" for known in get_close_matches(name, COMMANDS, 1))
            raise ValueError(f"expected a command ({', '.join(COMMANDS)}), got {name!r}{near}")
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    except BrokenPipeError:  # a reader such as head has exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout again at exit
        sys.exit(128 + signal.SIGPIPE)
    except (ValueError, OSError, ModuleNotFoundError) as error:
        denied = isinstance(error, PermissionError)
        advice = ". Change its permissions, or choose another path; MANIFOLD_TYING_CACHE moves prepared corpora"
        print(f"error: {error}{advice if denied else ''}", file=sys.stderr)
        sys.exit(2)


def _run(name: str, arguments: list[str]) -> None:
    """Run ``run_NAME`` with a ``NameConfig``; both are imported only here."""
    with needs_extra("train", "training and the command line need"):
        from rich.console import Console

        from manifold_tying.training import commands

        command = _experiments() if name == "reproduce" else commands
    config = commands.parsed(getattr(command, f"{name.capitalize()}Config"), name, arguments)
    # No markup, because text contains user-chosen names: "[/x]" would raise an error, "[final]" would vanish.
    getattr(command, f"run_{name}")(config, Console(markup=False, emoji=False))


def _experiments() -> ModuleType:
    """Import the comparisons from the checkout; ValueError if the package is not in one."""
    checkout = Path(__file__).resolve().parents[1]
    if not (checkout / "experiments").is_dir():
        raise ValueError(
            "reproduce needs the folder experiments/ of the repository, which an installed package lacks. Run "
            "pip install --editable '.[train]' in a checkout, then repeat the command"
        )
    if str(checkout) not in sys.path:
        sys.path.insert(0, str(checkout))  # first, because the user may have another folder of that name
    return importlib.import_module("experiments.recipes")
