"""The built-in corpus: English prose out of the documentation that every Python installation carries.

It lets pretraining be tried without a network and without a file: the help topics of the interpreter, then the
docstrings of the standard library and of the installed packages, read as source and never imported.
"""

import ast
import os
import platform
import re
import sysconfig
import warnings
from collections.abc import Iterator
from importlib import metadata
from itertools import chain, groupby
from pathlib import Path
from pydoc_data.topics import topics


MAX_CHARACTERS = 9_000_000
# Part of the fingerprint: a change of the rules below must not meet texts that older rules have left in a cache.
FORMAT_VERSION = 1

_SKIPPED_FOLDERS = {"test", "tests", "testing", "_vendor", "idlelib", "lib2to3", "site-packages", "dist-packages"}
_MAX_FILE_BYTES = 500_000  # larger modules are generated tables
_MIN_WORDS = 8

_FENCED_CODE = re.compile(r"^[ \t]*(```|~~~).*?(^[ \t]*\1|\Z)", re.MULTILINE | re.DOTALL)
_MARKUP = [
    (re.compile(r":[\w:+-]+:`([^`<]+?)(?:\s*<[^>`]*>)?`"), r"\1"),  # :class:`Name`, :ref:`text <target>`
    (re.compile(r"`([^`<]+?)\s*<[^>`]*>`_{0,2}"), r"\1"),  # `text <address>`_
    (re.compile(r"\[([^\]\[]+)\]\([^)\s]*\)"), r"\1"),  # [text](address)
    (re.compile(r"\[`([^`]+)`\]"), r"\1"),  # [`Name`]
    (re.compile(r"\s*\[\d+\]_"), ""),  # the footnote mark [1]_
    (re.compile(r"`{1,2}([^`]*)`{1,2}_{0,2}"), r"\1"),  # ``code``, `Name`
    (re.compile(r"(?<!\w)\*{1,2}([^\s*][^*]*?)\*{1,2}(?!\w)"), r"\1"),  # *emphasis*, **strong**
    (re.compile(r"(?<![\w.])~(?=\w)"), ""),  # ~module.Name
]
# What sentences do not hold: prompts, table rules, assignments, TeX, addresses, leftover markup, field lists.
_NOT_PROSE = re.compile(r">>>|\.\.\.\.|\||==|--|\s=\s|->|::|\\|\$|[{}<>*^`#@]|https?:|__\w|^:\w|^\.\. ")
_SENTENCE = re.compile(r"[A-Z\"'(].*[.!?][)\"']?", re.DOTALL)
_NO_LETTER = re.compile(r"[^a-z]+")
# Half of the words of running English are among the commonest hundred; tables and code hardly hold one of them.
_COMMON_WORDS = frozenset(
    "a all also an and any are as at be been but by can do does each for from has have how if in into is it its may "
    "more must no not of on one only or other same should so some such than that the their them then there these "
    "they this to two was we when where which will with would you your".split()
)


def iter_documentation(max_characters: int = MAX_CHARACTERS) -> Iterator[str]:
    """
    Read the documentation of this Python installation as English prose.

    A document is one help topic or the docstrings of one module, with one paragraph a line; the one that reaches
    `max_characters` is the last. The order is fixed: help topics, standard library, installed packages by name. Code,
    doctests, tables, lists of parameters and repeated paragraphs are left out, modules that cannot be read or parsed
    skipped.
    """
    seen: set[str] = set()
    num_characters = 0
    modules = (path for folder in ("stdlib", "purelib") for path in _iter_modules(Path(sysconfig.get_path(folder))))
    for docstrings in chain(([topics[name]] for name in sorted(topics)), map(_read_docstrings, modules)):
        paragraphs = []
        for paragraph in chain.from_iterable(map(_prose_paragraphs, docstrings)):
            # Packages repeat one another's paragraphs with other names and numbers in them.
            key = _NO_LETTER.sub("", paragraph.lower())
            if key not in seen:
                seen.add(key)
                paragraphs.append(paragraph)
        if paragraphs:
            yield (document := "\n".join(paragraphs))
            num_characters += len(document)
        if num_characters >= max_characters:
            return


def documentation_versions() -> str:
    """The versions of Python and of everything installed with it: equal versions have equal documentation."""
    packages = sorted(f"{package.name}=={package.version}" for package in metadata.distributions())
    rules = f"format-{FORMAT_VERSION}-{MAX_CHARACTERS}"
    return " ".join([rules, f"python=={platform.python_version()}", *packages])


def _iter_modules(root: Path) -> Iterator[Path]:
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = sorted(name for name in subfolders if name.isidentifier() and name not in _SKIPPED_FOLDERS)
        for name in sorted(files):
            path = Path(folder, name)
            if path.suffix == ".py" and path.is_file() and path.stat().st_size <= _MAX_FILE_BYTES:
                yield path


def _read_docstrings(path: Path) -> list[str]:
    try:
        source = path.read_bytes()
        if b'"""' not in source:
            return []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # other people's invalid escape sequences
            return list(_iter_docstrings(ast.parse(source)))
    except (OSError, SyntaxError, ValueError, RecursionError):
        return []


def _iter_docstrings(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    if docstring := ast.get_docstring(node):
        yield docstring
    if isinstance(node, (ast.Module, ast.ClassDef)):
        for child in node.body:
            if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                yield from _iter_docstrings(child)


def _prose_paragraphs(docstring: str) -> Iterator[str]:
    """Paragraphs of a docstring that read as English, each on one line and without markup."""
    lines = _FENCED_CODE.sub("\n", docstring).split("\n")
    # Text that is set further in or out belongs to something else: the entry of a list, an example.
    for _, block in groupby(lines, lambda line: len(line) - len(line.lstrip()) if line.strip() else None):
        paragraph = " ".join(map(str.strip, block))
        for pattern, replacement in _MARKUP:
            paragraph = pattern.sub(replacement, paragraph)
        paragraph = " ".join(paragraph.split())
        if _is_prose(paragraph):
            yield paragraph


def _is_prose(paragraph: str) -> bool:
    words = paragraph.split()
    if len(words) < _MIN_WORDS or not _SENTENCE.fullmatch(paragraph) or _NOT_PROSE.search(paragraph):
        return False
    num_letters = sum(map(str.isalpha, paragraph))
    num_common = sum(word.lower().strip(".,;:()") in _COMMON_WORDS for word in words)
    return paragraph.isascii() and num_letters > 0.75 * len(paragraph) and num_common > 0.25 * len(words)
