"""The guides, done: their commands in order, with two steps in place of hundreds, and every block of Python."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from support.processes import run_program


ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "model_cards").glob("*.md"))]


def python_blocks(paths):
    return [
        (f"{path.name}, block {number}", block)
        for path in paths
        for number, block in enumerate(re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL))
    ]


def run_script(command, folder, *more):
    """A command of a document, in another folder than the project's."""
    script, *flags = shlex.split(command[command.index("scripts/") :])
    flags = [str(ROOT / flag) if flag.startswith("configuration/") else flag for flag in flags]
    result = subprocess.run(
        [sys.executable, str(ROOT / script), *flags, *more, "--use_cpu"],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_DATASETS_CACHE": str(folder / "cache")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]


@pytest.mark.slow
def test_the_five_steps_and_every_block_of_python(tmp_path):
    guide = README[README.index("## From nothing to a model of your own") : README.index("## Use")]
    (texts, _), *_ = re.findall(r"```python\n(.*?)```()", guide, re.DOTALL)
    (tmp_path / "runs").mkdir()
    run_program(texts, folder=tmp_path, name="texts")
    quick = "accelerate launch scripts/pretrain_mlm.py --recipe configuration/pretrain/quickstart.yaml"
    text = ["--train_file", "runs/texts.txt", "--vocab_size", "1000", "--per_device_train_batch_size", "2"]
    short = ["--max_steps", "2", "--max_eval_samples", "4"]
    run_script(quick, tmp_path, *text, *short)
    commands = re.findall(r"^accelerate launch scripts/.*$", guide, re.MULTILINE)
    assert len(commands) == 4
    assert commands[3] == f"{commands[2]} --push_to_hub --hub_model_id you/library"  # which tests cannot
    for command in commands[:3]:
        samples = ["--max_train_samples", "40"] if "run_classification" in command else []
        run_script(command, tmp_path, *short, *samples)
    assert (tmp_path / "runs" / "library" / "report.md").is_file()
    for name, block in python_blocks(DOCUMENTS):  # one that does not register SKTformer itself meets no SKTformer
        run_program(block, folder=tmp_path, name=name)
    assert (tmp_path / "model.onnx").is_file()


def commands_of(document, *scripts):
    text = (ROOT / "model_cards" / document).read_text(encoding="utf-8").replace("\\\n", " ")
    blocks = "".join(re.findall(r"```bash\n(.*?)```", text, re.DOTALL))
    return [line for line in blocks.splitlines() if any(f"scripts/{script}" in line for script in scripts)]


@pytest.mark.slow
def test_the_guide_to_long_documents(tmp_path):
    words = (
        "the quick brown fox jumps over a lazy dog while old ships sail slowly past the harbour of our town".split()
    )
    for part in ("train", "test"):
        (tmp_path / "novels" / part).mkdir(parents=True)
        for author, start in (("gray", 0), ("moss", 7)):
            text = " ".join(f"{words[(start + n * n) % len(words)]}" for n in range(30_000))
            (tmp_path / "novels" / part / f"{author}_{part}_1900.txt").write_text(text, encoding="utf-8")
    pretrain, adapt, *classify = commands_of("long_documents.md", "pretrain_mlm.py", "run_classification.py")
    short = ("--max_steps", "2", "--max_eval_samples", "2")
    run_script(pretrain, tmp_path, *short, "--vocab_size", "200", "--per_device_train_batch_size", "1")
    run_script(adapt, tmp_path, *short)
    compute, *tune = classify
    run_script(compute, tmp_path, "--max_train_samples", "8", "--max_eval_samples", "2")
    report = (tmp_path / "runs" / "authors-4096" / "report.md").read_text(encoding="utf-8")
    assert "TF-IDF" in report
    assert len(tune) == 2
    for command in tune:
        flags = ("--max_train_samples", "4", "--global_batch_size", "2", "--per_device_train_batch_size", "2")
        run_script(re.sub(r"--num_train_epochs \S+", "", command), tmp_path, *short, *flags)
    poolings = {"novels-4096": "mean", "authors-4096": "layers", "authors-tuned": "mean_std"}
    for name, pooling in poolings.items():
        config = json.loads((tmp_path / "runs" / name / "config.json").read_text(encoding="utf-8"))
        assert (config["max_position_embeddings"], config["classifier_pooling"]) == (4096, pooling)


@pytest.mark.slow
def test_the_guide_to_forecasts(tmp_path):
    rows = [f"2020-{1 + n // 28:02d}-{1 + n % 28:02d},{n % 7 + n / 100},{n % 5}" for n in range(336)]
    for name in ("sales.csv", "new.csv"):
        (tmp_path / name).write_text("\n".join(["day,north,south", *rows]) + "\n", encoding="utf-8")
    train, predict = commands_of("forecasting.md", "run_forecasting.py")[:2]
    run_script(train, tmp_path, "--context_length", "28", "--num_train_epochs", "1", "--mask_missing")
    run_script(predict, tmp_path, "--mask_missing")
    for folder in ("sales", "new"):
        forecast = (tmp_path / "runs" / folder / "horizon-28" / "forecast.csv").read_text(encoding="utf-8")
        assert len(forecast.splitlines()) == 29
        assert forecast.splitlines()[1].startswith("2020-12-29")


def test_blocks_of_python_import_what_they_use():
    for name, block in python_blocks(DOCUMENTS):
        if "from_pretrained(" in block or "pipeline(" in block:
            assert "import modeling_sktformer" in block, name


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [[], ["-m", "accelerate.commands.launch"], ["-m", "torch.distributed.run"]])
def test_scripts_start_from_any_folder(tmp_path, launcher):
    def start(script: Path, *flags: str) -> str:
        command = [sys.executable, *launcher, str(script), *flags]
        result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr[-2000:]
        return result.stdout

    scripts = sorted((ROOT / "scripts").glob("*.py"))
    for script in scripts[:1] if launcher else scripts:
        assert "usage:" in start(script, "--help")
    (tmp_path / "text.txt").write_text("a cat sat on a mat and slept\n\n" * 200, encoding="utf-8")
    flags = ["--recipe", str(ROOT / "configuration" / "pretrain" / "quickstart.yaml"), "--train_file", "text.txt"]
    flags += ["--max_steps", "2", "--vocab_size", "40", "--max_seq_length", "16", "--use_cpu", "--output_dir", "out"]
    start(ROOT / "scripts" / "pretrain_mlm.py", *flags)
    assert (tmp_path / "out" / "model.safetensors").is_file()
