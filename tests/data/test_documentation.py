"""The corpus that every Python installation carries."""

import pytest

from experiments.text import corpus as corpus_module
from experiments.text import documentation
from support.texts import load, make_texts, write


# The documentation corpus


def test_the_documentation_reads_as_prose():
    documents = list(documentation.iter_documentation(max_characters=400_000))
    text = "\n".join(documents)
    paragraphs = text.split("\n")
    assert 400_000 <= len(text) < 500_000
    assert text.isascii()
    assert sum(map(str.isalpha, text)) > 0.78 * len(text)
    assert sum(word in ("the", "a", "of", "is", "to") for word in text.split()) > 0.1 * len(text.split())
    assert all(paragraph[-1] in ".!?)\"'" and len(paragraph.split()) >= 8 for paragraph in paragraphs)
    assert not [paragraph for paragraph in paragraphs if ">>>" in paragraph or "``" in paragraph or "--" in paragraph]
    assert len(set(paragraphs)) == len(paragraphs)


MODULE = '''
"""Tools for clocks.

The clocks of this module are read by many people, and they show the time of :class:`day <Day>` that it is.

    >>> read_clock()
    The time that is shown here is not a sentence of the text.

Parameters
----------
clock : Clock
    The clock to read, which must have been wound up by one of the users before.

========  ==========
the one   the other
========  ==========

.. note:: This directive is not a part of the text that we want to have here.

```python
# The words of this line are in a program, and they are not for the reader.

The words of this line are in the same program, and so it is left out.
```
"""


class Clock:
    """The clocks of this module are read by many people, and they show the time of day that it is."""

    def wind(self):
        """Wind up the ``clock`` so that it will show the *right* time to all of them."""
'''


def test_only_the_prose_of_a_docstring_is_kept(tmp_path, monkeypatch):
    write(tmp_path / "lib" / "clocks.py", MODULE)
    write(
        tmp_path / "lib" / "tests" / "test_clocks.py",
        '"""The tests of a package are not a part of the text that we read."""',
    )
    write(
        tmp_path / "lib" / "broken.py",
        'def broken(:\n    """This is not Python, so that there is no way to read it."""',
    )
    monkeypatch.setattr(
        documentation, "topics", {"TOPIC": "There is one more document, and it is the first of all of them."}
    )
    monkeypatch.setattr(documentation.sysconfig, "get_path", lambda name: str(tmp_path / "lib"))
    assert [document.split("\n") for document in documentation.iter_documentation()] == [
        ["There is one more document, and it is the first of all of them."],
        [
            "The clocks of this module are read by many people, and they show the time of day that it is.",
            "The clock to read, which must have been wound up by one of the users before.",
            "Wind up the clock so that it will show the right time to all of them.",
        ],
    ]


@pytest.mark.parametrize("streaming", [False, True])
def test_the_documentation_is_the_default_corpus(tmp_path, monkeypatch, streaming):
    calls = []

    def read_documentation():
        calls.append(True)
        return iter(make_texts(300))

    monkeypatch.setattr(corpus_module, "iter_documentation", read_documentation)
    versions = ["python==1"]
    monkeypatch.setattr(corpus_module, "documentation_versions", lambda: versions[0])
    corpora = [load(tmp_path, streaming=streaming) for _ in range(2)]
    assert len(calls) == 1, "the second time it comes from the cache"
    first, second = corpora
    texts = [*first.train[0], *first.validation[0]]
    assert sorted(texts) == sorted(make_texts(300))
    assert 0 < len(list(first.validation[0])) < 20
    assert first.train[0].fingerprint == second.train[0].fingerprint
    versions[0] = "python==2"
    assert load(tmp_path, streaming=streaming).train[0].fingerprint != first.train[0].fingerprint
    assert len(calls) == 2
