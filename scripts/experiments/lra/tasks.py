"""The tasks of Long Range Arena: what an input is, how long, and what there is to tell apart."""

from collections.abc import Mapping
from dataclasses import dataclass

from experiments.lra import images, listops, pathfinder, texts


@dataclass(frozen=True)
class Task:
    """
    A task.

    Args:
        title (`str`): Its name in tables.
        labels (`tuple` of `str`): What there is to tell apart.
        num_values (`int`): What a value of an input can be: bytes, grey values, symbols.
        max_length (`int`): The published length: in symbols, bytes, bytes of each of two, pixels.
        count (`int`): Published examples, of all parts.
        hub (`str`, *optional*): Its data set on the Hub.
        is_made (`bool`): Whether a seed makes its examples where no data are given.
        is_picture (`bool`): Whether an input is a square picture.
        can_be_cut (`bool`): Whether the beginning of an input that is too long still has its label.
        per_example (`int`): Sequences in an example.
    """

    title: str
    labels: tuple[str, ...]
    num_values: int
    max_length: int
    count: int
    hub: str | None = None
    is_made: bool = False
    is_picture: bool = False
    can_be_cut: bool = True
    per_example: int = 1


_DIGITS = tuple(map(str, range(10)))
_PUBLISHED_EXPRESSIONS = sum(listops.SIZES.values())
TASKS: Mapping[str, Task] = {
    "listops": Task(
        "ListOps", _DIGITS, len(listops.VOCABULARY), 2000, _PUBLISHED_EXPRESSIONS, is_made=True, can_be_cut=False
    ),
    "text": Task("Text", ("negative", "positive"), 256, 1000, 50_000, hub=texts.IMDB),
    "retrieval": Task("Retrieval", ("unrelated", "related"), 256, 4000, 182_613, per_example=2),
    "image": Task(
        "Image", images.CLASSES, 256, 1024, 60_000, hub=images.HUB_DATASET, is_picture=True, can_be_cut=False
    ),
    "pathfinder": Task(
        "Pathfinder",
        ("apart", "connected"),
        256,
        1024,
        pathfinder.COUNT,
        is_made=True,
        is_picture=True,
        can_be_cut=False,
    ),
}
