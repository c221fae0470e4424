"""Recipes and flags."""

import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from experiments.arguments import UserError, given_arguments, parse_args


@dataclass
class Arguments:
    rate: float = field(default=0.5)
    steps: int = field(default=3)
    names: list[str] | None = field(default=None)
    scale: bool = field(default=True)
    mode: str = field(default="no")


def parse(tmp_path, recipes, *flags):
    paths = []
    for number, text in enumerate(recipes):
        paths.append(tmp_path / f"recipe{number}.yaml")
        paths[-1].write_text(text)
    argv = ["--recipe", *map(str, paths)] if paths else []
    return parse_args([Arguments], [*argv, *flags])[0]


def test_recipes_are_read_from_left_to_right_and_flags_last(tmp_path):
    recipes = ["rate: 1e-4\nsteps: 7\nnames: [a, b]\n", "steps: 8\nscale: false\n"]
    arguments = parse(tmp_path, recipes, "--names", "c")
    assert arguments == Arguments(rate=1e-4, steps=8, names=["c"], scale=False)


def test_recipes_may_be_given_one_by_one(tmp_path):
    (tmp_path / "a.yaml").write_text("steps: 7\n")
    (tmp_path / "b.yaml").write_text("rate: 2.0\n")
    (arguments,) = parse_args([Arguments], ["--recipe", f"{tmp_path}/a.yaml", "--recipe", f"{tmp_path}/b.yaml"])
    assert (arguments.steps, arguments.rate) == (7, 2.0)


@pytest.mark.parametrize(
    ("recipe", "flags", "message"),
    [
        ("stepz: 7\n", [], "no such flag: stepz"),
        ("steps: 7\nsteps: 8\n", [], "`steps` stands twice"),
        ("steps:\n", [], "`steps` is empty"),
        ("steps: many\n", [], "invalid int value: 'many'"),
        ("- steps\n", [], "must hold `flag: value` lines"),
        ("steps: [\n", [], "not valid YAML"),
        ("", ["--stepz", "7"], "--stepz"),
        ("", ["--step", "7"], "--step"),
    ],
)
def test_mistakes_are_explained(tmp_path, recipe, flags, message):
    with pytest.raises(UserError, match=message) as error:
        parse(tmp_path, [recipe], *flags)
    assert "\n" not in str(error.value)


def test_missing_recipe_is_explained():
    with pytest.raises(UserError, match=r"nowhere\.yaml cannot be read \(No such file"):
        parse_args([Arguments], ["--recipe", "nowhere.yaml"])


def test_given_arguments_give_the_same_arguments_again(tmp_path):
    (tmp_path / "a.yaml").write_text("rate: 2\nnames: [x, y]\n")
    argv = ["--recipe", str(tmp_path / "a.yaml"), "--no_scale", "--mode=yes"]
    given = given_arguments([Arguments], argv)
    assert given == {"rate": 2.0, "names": ["x", "y"], "scale": False, "mode": "yes"}
    (arguments,) = parse_args([Arguments], argv)
    assert parse(tmp_path, [yaml.safe_dump(given)]) == arguments


def test_a_mistake_ends_a_script_with_one_line_and_status_2(tmp_path):
    script = Path(__file__).parents[2] / "scripts" / "train_tokenizer.py"
    result = subprocess.run(
        [sys.executable, str(script), "--nonsense", "1"], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert result.returncode == 2
    assert result.stderr.strip().splitlines()[-1].startswith("train_tokenizer.py: error:")
    assert "Traceback" not in result.stderr
    assert not list(tmp_path.iterdir())
