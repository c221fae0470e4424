"""What the documents say can be done can be done: commands parse, links lead somewhere, numbers are right."""

import ast
import configparser
import importlib
import re
import shlex
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import analyze
import benchmark
import pretrain_mlm
import reproduce
import run_classification
import run_forecasting
import run_glue
import run_lra
import train_tokenizer
from experiments.arguments import parse_args
from experiments.comparisons.tables import TABLES
from experiments.text.corpus import CorpusArguments
from modeling_sktformer import SKTformerConfig, SKTformerForMaskedLM, available_presets, load_preset


ROOT = Path(__file__).parents[2]
NUMBER = re.compile(r"(?<![\w.,-])\d+(?:,\d{3})*(?:\.\d+)?(?![\w-])")
DOCUMENTS = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "model_cards").rglob("*.md")),
    ROOT / "configuration" / "README.md",
]
SCRIPTS: dict[str, list[type]] = {
    "pretrain_mlm.py": list(pretrain_mlm.ARGUMENTS),
    "train_tokenizer.py": [train_tokenizer.TokenizerArguments, CorpusArguments],
    "run_glue.py": list(run_glue.ARGUMENTS),
    "run_classification.py": list(run_classification.ARGUMENTS),
    "run_forecasting.py": list(run_forecasting.ARGUMENTS),
    "run_lra.py": list(run_lra.ARGUMENTS),
    "reproduce.py": list(reproduce.ARGUMENTS),
    "analyze.py": [],  # each analysis has its own
    "benchmark.py": [benchmark.BenchmarkArguments],
}


def code_in(path: Path) -> str:
    """Lines that call a script: fenced blocks and inline code of a document, the examples of a script's docstring."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        docstring = (ast.get_docstring(ast.parse(text)) or "").replace("\\\n", " ")
        return "\n".join(line for line in docstring.splitlines() if line.startswith("    "))
    fenced = re.findall(r"```bash\n(.*?)```", text.replace("\\\n", " "), flags=re.DOTALL)
    return "\n".join([*fenced, *re.findall(r"`(scripts/[^`\n]+)`", text)])


def document_commands() -> list[tuple[str, str]]:
    return [
        (path.name, command.strip())
        for path in [*DOCUMENTS, *sorted((ROOT / "scripts").glob("*.py"))]
        for command in re.findall(r"scripts/\w+\.py[^\n#&]*", code_in(path))
    ]


def test_documents_name_every_script():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = {command.split()[0] for _, command in document_commands()}
    assert {f"scripts/{name}" for name in SCRIPTS} <= commands
    assert "accelerate launch scripts/pretrain_mlm.py" in readme
    assert "accelerate launch scripts/run_glue.py" in readme


@pytest.mark.parametrize(("document", "command"), document_commands())
def test_commands_in_documents_parse(document, command, monkeypatch):
    monkeypatch.chdir(ROOT)
    script, *flags = shlex.split(command)
    assert (ROOT / script).is_file()
    name = Path(script).name
    if not flags and name not in ("pretrain_mlm.py", "benchmark.py"):
        return  # a mention: the others need to be told what to read or where to write
    if name in ("reproduce.py", "analyze.py"):  # whose first word says which table or analysis
        table, *flags = flags
        assert table in (TABLES if name == "reproduce.py" else analyze.ANALYSES)
        flags += ["--table", table] if name == "reproduce.py" else []
        if name == "analyze.py":
            parse_args(analyze.ANALYSES[table][0], flags)
            return
    trains = name in ("pretrain_mlm.py", "run_glue.py", "run_classification.py", "run_forecasting.py", "run_lra.py")
    extra = ["--use_cpu"] if trains and "--use_cpu" not in flags else []
    parse_args(SCRIPTS[Path(script).name], [*flags, *extra])


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            assert (path.parent / target).exists(), target


def test_python_in_documents_uses_names_that_exist():
    checked = 0
    for path in DOCUMENTS:
        for block in re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), flags=re.DOTALL):
            for node in ast.walk(ast.parse(block)):
                if isinstance(node, ast.ImportFrom) and node.module:
                    module = importlib.import_module(node.module)
                    assert all(hasattr(module, alias.name) for alias in node.names)
                    checked += 1
    assert checked > 3


def test_fields_in_the_architecture_exist():
    text = (ROOT / "model_cards" / "architecture.md").read_text(encoding="utf-8")
    table = re.findall(r"^\| [^|]+ \| `(\w+)`(?:, d / H)? \| ([^|]+) \|", text, flags=re.MULTILINE)
    assert len(table) > 5
    config = SKTformerConfig()
    for name, default in table:
        values = default.split(",")
        if values[0].strip():
            assert getattr(config, name) == int(values[0])


def test_presets_are_described_as_they_are():
    text = (ROOT / "model_cards" / "presets.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[?(sktformer-[\w-]+)(?:\]\([\w.-]+\))? \|(.+)\|$", text, flags=re.MULTILINE)
    assert sorted(name for name, _ in rows) == available_presets()
    for name, cells in rows:
        config = load_preset(name)
        with torch.device("meta"):
            model = SKTformerForMaskedLM(config)
        expected = [config.num_hidden_layers, config.hidden_size, config.intermediate_size, config.num_attention_heads]
        assert [int(cell.replace(",", "")) for cell in cells.split("|")] == [*expected, model.num_parameters()]
        assert config.smoother_norm == "layer_norm"


def test_every_field_is_documented():
    documented = SKTformerConfig.__doc__ or ""
    own = set(SKTformerConfig.__annotations__) - {"bos_token_id", "eos_token_id"}
    assert {name for name in own if not re.search(rf"\b{name} \(", documented)} == set()


def test_entry_points_are_short_and_nobody_s_library():
    entries = {path.stem: path for path in (ROOT / "scripts").glob("*.py")}
    assert all(len(path.read_text(encoding="utf-8").splitlines()) <= 200 for path in entries.values())
    for path in (ROOT / "scripts").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.split(".")[0] for name in names} & entries.keys(), path


def test_the_package_is_short_and_names_what_it_computes():
    texts = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "modeling_sktformer").glob("*.py")}
    lengths = {name: len(text.splitlines()) for name, text in texts.items()}
    assert sum(lengths.values()) <= 2700
    assert max(lengths["attention.py"], lengths["smoothing.py"]) <= 300
    for path, names in {
        "attention.py": ["Equation 1", "Equation 2", "Equation 3", "Equation 4", "Algorithm 1"],
        "smoothing.py": ["Equation 5", "Equation 6", "Algorithm 2"],
        "forecasting.py": ["Algorithm 3", "Algorithm 4"],
    }.items():
        assert [name for name in names if not re.search(rf"{name}\b", texts[path])] == []


def test_versions_agree():
    import modeling_sktformer

    version = modeling_sktformer.__version__
    assert f"version: {version}" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(("folder", "least"), [(ROOT, 8), (ROOT / "model_cards" / "results", 20)])
def test_the_numbers_that_matter_stand_in_the_results_they_name(folder, least):
    """In rows of the model that they are said to be of; a row without a link is of the file of the one above it."""
    text = (folder / "README.md").read_text(encoding="utf-8")
    tables = re.findall(
        r"^\| what \| SKTformer \| best other \| order \|\n.*\n((?:\|.*\n)+)", text, flags=re.MULTILINE
    )
    rows = [row for table in tables for row in table.splitlines()]
    assert len(rows) > least
    results = ""
    for row in rows:
        what, ours, others, _ = row.strip("| ").split(" | ")
        if link := re.search(r"\(([\w/]+\.md)\)", what):
            results = (folder / link[1]).read_text(encoding="utf-8")
        for said in (ours, *others.split(";")):
            found = numbers_of(results, None if said is ours else said)
            for number in NUMBER.findall(re.sub(r"after \d+ steps", "", said)):
                rounding = 0.5001 * 10 ** -len(number.partition(".")[2])
                assert any(abs(value - float(number.replace(",", ""))) <= rounding for value in found), (what, number)


def numbers_of(results, said):
    """Those in the rows of SKTformer, or of what is said of another: in rows that it names, if it names any."""
    rows = re.findall(r"^\| (\w[^|]*?) *\|(.*)$", results, flags=re.MULTILINE)
    if said is None:
        named = [cells for name, cells in rows if name.startswith(("SKTformer", "best-")) and "(paper)" not in name]
    elif "paper's own" in said:
        named = [cells for name, cells in rows if name.endswith("(paper)")]
    else:
        named = [
            cells for name, cells in rows if re.search(rf"\b{re.escape(name.split(' (')[0])}\b", said, re.IGNORECASE)
        ]
    return {float(number.replace(",", "")) for number in NUMBER.findall(" ".join(named) or results)}


def test_pinned_versions_satisfy_the_requirements():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins: dict[str, str] = {
        canonicalize_name(name): version for name, version in (n.split("==") for n in lines if "==" in n)
    }
    setup = configparser.ConfigParser(interpolation=None)
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    asked = setup["options"]["install_requires"] + "".join(setup["options.extras_require"].values())
    requirements = [Requirement(line) for line in asked.splitlines() if line and not line.startswith("%")]
    assert len(requirements) > 20
    for requirement in requirements:
        assert pins[canonicalize_name(requirement.name)] in requirement.specifier
    assert (pins["torch"], pins["transformers"], pins["datasets"]) == ("2.13.0", "5.24.0", "5.2.0")
