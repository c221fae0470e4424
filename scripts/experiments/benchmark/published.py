"""What the paper reports of speed and memory, of its model for Text of Long Range Arena on a V100."""

from experiments.results import format_table


_LENGTHS = (1024, 2048, 3072, 4096)
# Training steps per second, of 32 inputs, and peak memory in GB at these lengths; None where it did not suffice.
_ROWS: dict[str, tuple[tuple[float | None, ...], tuple[float | None, ...]]] = {
    "SKTformer": ((32.2, 20.4, 15.9, 12.3), (1.8, 2.3, 2.8, 3.2)),
    "Transformer": ((23.8, 7.8, 3.9, None), (3.7, 11.1, 22.1, None)),
    "Nyströmformer": ((33.3, 22.7, 17.2, 14.7), (1.6, 2.2, 2.4, 2.9)),
    "Reformer": ((28.5, 15.1, 11.9, 9.1), (2.2, 3.2, 4.2, 4.9)),
    "Linformer": ((37.0, 20.8, 14.9, 11.9), (2.3, 3.3, 4.3, 5.2)),
    "Performer": ((29.4, 16.9, 8.7, 9.3), (2.3, 3.1, 4.0, 4.8)),
}


def format_published() -> list[str]:
    """Paragraphs of a section with the paper's figures."""
    header = ["model", *(f"{length:,}" for length in _LENGTHS)]
    speeds = [[title, *map(_format_speed, speeds, _ROWS["Transformer"][0])] for title, (speeds, _) in _ROWS.items()]
    memories = [[title, *map(_format, memories)] for title, (_, memories) in _ROWS.items()]
    return [
        "## As the paper has it: LRA model, 2 layers, batch 32, one V100",
        "Training steps per second, and in brackets the multiple of its Transformer's speed.",
        "\n".join(format_table(header, speeds)),
        "Peak memory, GB.",
        "\n".join(format_table(header, memories)),
    ]


def _format(figure: float | None) -> str:
    return "out of memory" if figure is None else f"{figure:g}"


def _format_speed(speed: float | None, baseline: float | None) -> str:
    return _format(speed) + (f" ({speed / baseline:.2f})" if speed and baseline else "")
