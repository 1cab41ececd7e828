"""The child processes of a server as data, and the environment that each of them is given.

Owns the table and the cleaning of the environment. It starts nothing, and it imports none of the modules it names.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from procs.model_download import cache_folder
from shm.child import StartupError
from shm.config import ServerConfig
from shm.control import STAGES
from shm.limits import DEATHS_IN_A_ROW, STABLE_SECONDS

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("shm", "gpu", "procs", "tools", "frontend")

STANDBY_WORD = "--standby"

# What would let a user's settings change our modules, our assertions or our exit; and a secret that nobody below needs.
_DROPPED = ("PYTHONPATH", "PYTHONSTARTUP", "PYTHONINSPECT", "PYTHONOPTIMIZE", "STEPAHEAD_API_KEY")
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


@dataclass(frozen=True, kw_only=True)
class ChildSpec:
    """One child. Which rings it gets follows from `shm.records.ring_specs`; `{threads}` in `env` is filled in."""

    stage: str
    module: str  # run as `python -m`
    ready_seconds: float  # a start that takes longer has failed
    # One that is started again, and sleeps for so long, hangs. (A first start may wait for a compiler.)
    asleep_seconds: float = 15.0
    stop_seconds: float  # from SIGTERM to SIGKILL
    listens: bool = False  # gets the listening socket
    env: Mapping[str, str] = field(default_factory=dict)
    # How it is started again: so long after its first death in a row, its second, and so on, and never after one more
    # than so many, in a row or in a minute. Whoever has served for so long begins a new row.
    backoff_seconds: tuple[float, ...] = (0.0, 0.0, 0.1, 0.5, 1.0)
    deaths_in_a_row_max: int = 7
    deaths_a_minute_max: int = 60
    stable_seconds: float = STABLE_SECONDS
    # The same of its standby, whose death is nobody's loss: there is no hurry.
    standby_backoff_seconds: tuple[float, ...] = (1.0, 2.0, 5.0, 10.0)
    standby_deaths_in_a_row_max: int = 5
    # That every stage has served before it is started. More for those whose deaths leave much to be computed again.
    standby_after_seconds: float = 0.1


# Started in this order, stopped in reverse: nobody loses the stage behind it while it still has work.
CHILD_SPECS = (
    # Loads the weights and, in a new environment, compiles the kernels: minutes on a slow machine.
    ChildSpec(
        stage="gpu",
        module="procs.executor",
        ready_seconds=900,
        stop_seconds=5,
        standby_after_seconds=0.5,  # all rows may have to be prefilled first
        env={"OMP_NUM_THREADS": "{threads}", "MKL_NUM_THREADS": "{threads}", "NUMBA_NUM_THREADS": "{threads}"},
    ),
    ChildSpec(stage="scheduler", module="procs.scheduler", ready_seconds=60, stop_seconds=3, env=_ONE_THREAD),
    ChildSpec(stage="detokenizer", module="procs.detokenizer", ready_seconds=120, stop_seconds=3, env=_ONE_THREAD),
    ChildSpec(
        stage="tokenizer",
        module="procs.tokenizer",
        ready_seconds=120,
        stop_seconds=3,
        env={**_ONE_THREAD, "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
    ),
    ChildSpec(
        stage="frontend", module="frontend.server", ready_seconds=60, stop_seconds=7, listens=True, env=_ONE_THREAD
    ),
)

assert {spec.stage for spec in CHILD_SPECS} == set(STAGES) - {"supervisor"}
assert len({spec.stage for spec in CHILD_SPECS}) == len(CHILD_SPECS)
assert all(spec.deaths_in_a_row_max >= DEATHS_IN_A_ROW + 2 for spec in CHILD_SPECS), (
    "two requests that a stage dies of, the one and the other alone in the end, do not use up its deaths"
)


def child_environment(spec: ChildSpec, config: ServerConfig, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a child: the given one, cleaned, with the spec's own on top.

    Our packages come first on the module path, so that packages of the same names elsewhere cannot take their place.
    """
    env = {name: value for name, value in environ.items() if name not in _DROPPED}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), environ.get("PYTHONPATH"))))
    if env.get("PYTHONDONTWRITEBYTECODE") and "PYTHONPYCACHEPREFIX" not in env:
        # Whoever wants no bytecode beside the sources would have every start, and every restart, compile all of them:
        # more than half of the time that a stage takes. It is kept in our own cache instead.
        with contextlib.suppress(RuntimeError):  # the user has no home
            env["PYTHONPYCACHEPREFIX"] = str(cache_folder().parent / "bytecode")
            del env["PYTHONDONTWRITEBYTECODE"]
    env.update({name: value.format(threads=config.threads) for name, value in spec.env.items()})
    return env


def command(spec: ChildSpec, boot_fd: int, standby: bool = False) -> list[str]:
    """Return the command line of a child. -P: the folder it is started in is not on the module path.

    A standby is told apart from outside by its last word, until it has a title.
    """
    words = [sys.executable, "-P", "-m", "shm.launch", str(os.getpid()), spec.module, "--boot-fd", str(boot_fd)]
    return [*words, STANDBY_WORD] if standby else words


def check_package_names(root: Path = ROOT) -> None:
    """Raise StartupError if one of our package names resolves to anything but this project."""
    for name in PACKAGES:
        spec = find_spec(name)
        found = spec.origin if spec and spec.origin else "nothing"
        if found != str(root / name / "__init__.py") and Path(found).resolve() != root / name / "__init__.py":
            raise StartupError(
                f"the package '{name}' is {found}, not the one in {root}: start from another folder, or remove it"
            )
