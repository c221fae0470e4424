"""Processes that tests start, and do not start: importing the libraries takes longer than most tests."""

import atexit
import functools
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


_ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
# Imports the libraries once, without the package, and forks for each program that it is given.
_FORKS = """
import importlib.abc
import json
import os
import signal
import sys
import traceback

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

from transformers import AutoConfig, AutoModel, AutoTokenizer, BertTokenizer, PreTrainedModel, dynamic_module_utils

answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
for line in sys.stdin:
    program, arguments, folder = json.loads(line)
    if (child := os.fork()) == 0:
        status = 1
        signal.alarm(300)
        try:
            os.chdir(folder)
            said = os.open("said.txt", os.O_WRONLY | os.O_CREAT)
            os.dup2(said, 1), os.dup2(said, 2)
            sys.argv = ["-c", *arguments]
            dynamic_module_utils.HF_MODULES_CACHE = folder + "/modules"
            exec(program, {"__name__": "__main__", "sys": sys})
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(status)
    print(os.waitpid(child, 0)[1], file=answers, flush=True)
"""


def run_in_process(children, command, **options):
    """Call a script in this process, in the place of `runs.Children.run`."""
    script, *_ = flags = command[1:]
    with pytest.MonkeyPatch.context() as context:
        context.setattr(sys, "argv", flags)
        importlib.import_module(Path(script).stem).main()
    return 0


def run_without_package(program: str, *arguments: Path, folder: Path) -> None:
    """Run a program, which has `sys`, in a new folder, with modules of checkpoints of its own and no network."""
    folder.mkdir()
    process = _start()
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps([program, list(map(str, arguments)), str(folder)]) + "\n")
    process.stdin.flush()
    status, said = process.stdout.readline(), folder / "said.txt"
    assert status, f"the process that forks has ended with {process.wait()}"
    assert int(status) == 0, said.read_text() if said.is_file() else "nothing was said"


@functools.cache
def _start() -> subprocess.Popen[str]:
    pipes: dict = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-P", "-c", _FORKS], env=_ENVIRONMENT, **pipes)
    atexit.register(process.communicate)
    return process
