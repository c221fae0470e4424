"""Processes that tests start, and do not start: importing the libraries takes longer than most tests."""

import atexit
import functools
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


ROOT = Path(__file__).parents[2]
# Imports the libraries once, and forks for each program that it is given.
_FORKS = """
import json
import os
import signal
import sys
import traceback
from transformers import AutoConfig, AutoModel, AutoTokenizer, BertTokenizer, PreTrainedModel, dynamic_module_utils

answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
for line in sys.stdin:
    program, name, arguments, folder = json.loads(line)
    if (child := os.fork()) == 0:
        status = 1
        signal.alarm(300)
        try:
            os.chdir(folder)
            said = os.open("said.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(said, 1), os.dup2(said, 2)
            sys.argv = ["-c", *arguments]
            dynamic_module_utils.HF_MODULES_CACHE = folder + "/modules"
            exec(compile(program, name, "exec"), {"__name__": "__main__"})
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(status)
    print(os.waitpid(child, 0)[1], file=answers, flush=True)
"""
_OUT_OF_REACH = """
import importlib.abc
import sys

class OutOfReach(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "modeling_sktformer":
            raise ModuleNotFoundError(name, name=name)

sys.meta_path.insert(0, OutOfReach())
try:
    import modeling_sktformer
except ModuleNotFoundError:
    pass
else:
    sys.exit("the package is within reach")
"""


def run_in_process(children, command, **options):
    """Call a script in this process, in the place of `runs.Children.run`."""
    script, *_ = flags = command[1:]
    with pytest.MonkeyPatch.context() as context:
        context.setattr(sys, "argv", flags)
        importlib.import_module(Path(script).stem).main()
    return 0


def run_on_processes(number: int, script: str | Path, *flags: Any) -> str:
    """Start a script as a command of its own, on one process or more; what it has printed."""
    several = ["-m", "torch.distributed.run", "--nproc_per_node", str(number), "--standalone"]
    command = [sys.executable, *(several if number > 1 else []), str(script), *map(str, flags)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


def run_without_package(program: str, *arguments: Path, folder: Path) -> None:
    """Run a program, which has `sys`, in a new folder."""
    folder.mkdir()
    run_program(_OUT_OF_REACH + program, *arguments, folder=folder)


def run_program(program: str, *arguments: Path, folder: Path, name: str = "program") -> str:
    """Run a program in a folder, with modules of checkpoints of its own and no network; what it has printed."""
    process = _start()
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps([program, name, list(map(str, arguments)), str(folder)]) + "\n")
    process.stdin.flush()
    status = process.stdout.readline()
    assert status, f"the process that forks has ended with {process.wait()}"
    said = (folder / "said.txt").read_text()
    assert int(status) == 0, f"{name}: {said[-5000:]}"
    return said


@functools.cache
def _start() -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    pipes: dict = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-P", "-c", _FORKS], env=environment, **pipes)
    atexit.register(process.communicate)
    return process
