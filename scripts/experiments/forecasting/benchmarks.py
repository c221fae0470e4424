"""The public series that forecasters are compared on: how each is read and split, and what was published on it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np


HUB_DATASET = "thuml/Time-Series-Library"
HORIZONS = (96, 192, 336, 720)
# Published rows: MSE and MAE at each horizon of a benchmark, or MSE alone.
Published = Mapping[str, Sequence[Sequence[float]]]
PAPER = "SKTformer (paper)"


@dataclass(frozen=True)
class Benchmark:
    """
    A series of the protocol.

    Args:
        title (`str`): Its name in tables.
        file (`str`): Its configuration on the Hub, and the name of its CSV.
        season (`int`): Time steps after which it is most like itself.
        steps_per_month (`int`, *optional*):
            Of the ETT series, which are split into 12, 4 and 4 months of 30 days; the others are split 7 : 1 : 2.
        context_length (`int`), horizons (`tuple` of `int`): Time steps that are read and forecast.
        published (mapping): Rows by the name of the model, for contexts of `context_length`.
        published_elsewhere (mapping): Likewise for contexts of other lengths, by these.
    """

    title: str
    file: str
    season: int
    steps_per_month: int | None = None
    context_length: int = 96
    horizons: tuple[int, ...] = HORIZONS
    published: Published = field(default_factory=dict)
    published_elsewhere: Mapping[int, Published] = field(default_factory=dict)

    def published_at(self, horizon: int, context_length: int) -> dict[str, dict[str, float]]:
        """The published rows for a horizon, MSE and, where it is known, MAE; none for another context than theirs."""
        rows = {self.context_length: self.published, **self.published_elsewhere}.get(context_length, {})
        if horizon not in self.horizons:
            return {}
        place = self.horizons.index(horizon)
        return {name: dict(zip(("mse", "mae"), row[place], strict=False)) for name, row in rows.items()}


def _rows(**rows: Sequence[float]) -> Published:
    """Rows of MSE, MAE, MSE, MAE, ..., or of MSE alone, for four horizons; `paper` is the name of the paper's."""
    names = {"itransformer": "iTransformer", "patchtst": "PatchTST", "dlinear": "DLinear", "fedformer": "FEDformer"}
    titles = {"paper": PAPER, **{name: f"{title} (published)" for name, title in names.items()}}
    return {titles[name]: [*map(tuple, np.reshape(row, (len(HORIZONS), -1)).tolist())] for name, row in rows.items()}


# The paper's Table 2, of which FEDformer's rows are too, but on ETTh1, where they are its own paper's; the other rows
# as the papers on iTransformer and its successors reprint them, context 96.
BENCHMARKS = {
    "ettm2": Benchmark(
        "ETTm2",
        "ETTm2",
        season=96,
        steps_per_month=30 * 24 * 4,
        published=_rows(
            paper=(0.192, 0.283, 0.255, 0.324, 0.324, 0.364, 0.431, 0.433),
            itransformer=(0.180, 0.264, 0.250, 0.309, 0.311, 0.348, 0.412, 0.407),
            patchtst=(0.175, 0.259, 0.241, 0.302, 0.305, 0.343, 0.402, 0.400),
            dlinear=(0.193, 0.292, 0.284, 0.362, 0.369, 0.427, 0.554, 0.522),
            fedformer=(0.203, 0.269, 0.325, 0.421),
        ),
    ),
    "electricity": Benchmark(
        "Electricity",
        "electricity",
        season=24,
        published=_rows(
            paper=(0.218, 0.332, 0.259, 0.361, 0.267, 0.367, 0.293, 0.385),
            itransformer=(0.148, 0.240, 0.162, 0.253, 0.178, 0.269, 0.225, 0.317),
            dlinear=(0.197, 0.282, 0.196, 0.285, 0.209, 0.301, 0.245, 0.333),
            fedformer=(0.183, 0.195, 0.212, 0.231),
        ),
    ),
    "exchange": Benchmark(
        "Exchange",
        "exchange_rate",
        season=5,
        published=_rows(
            paper=(0.086, 0.204, 0.188, 0.292, 0.356, 0.433, 0.727, 0.669),
            itransformer=(0.086, 0.206, 0.177, 0.299, 0.331, 0.417, 0.847, 0.691),
            patchtst=(0.088, 0.205, 0.176, 0.299, 0.301, 0.397, 0.901, 0.714),
            fedformer=(0.139, 0.256, 0.426, 1.090),
        ),
    ),
    "traffic": Benchmark(
        "Traffic",
        "traffic",
        season=24,
        published=_rows(
            paper=(0.592, 0.352, 0.583, 0.343, 0.598, 0.346, 0.641, 0.397),
            itransformer=(0.395, 0.268, 0.417, 0.276, 0.433, 0.283, 0.467, 0.302),
            patchtst=(0.526, 0.347, 0.522, 0.332, 0.517, 0.334, 0.552, 0.352),
            dlinear=(0.650, 0.396, 0.598, 0.370, 0.605, 0.373, 0.645, 0.394),
            fedformer=(0.562, 0.562, 0.570, 0.596),
        ),
    ),
    "weather": Benchmark(
        "Weather",
        "weather",
        season=144,
        published=_rows(
            paper=(0.182, 0.262, 0.228, 0.306, 0.295, 0.355, 0.383, 0.418),
            itransformer=(0.174, 0.214, 0.221, 0.254, 0.278, 0.296, 0.358, 0.347),
            patchtst=(0.177, 0.218, 0.225, 0.259, 0.278, 0.297, 0.354, 0.348),
            fedformer=(0.217, 0.276, 0.339, 0.403),
        ),
    ),
    "ili": Benchmark(
        "ILI",
        "national_illness",
        season=52,
        context_length=36,
        horizons=(24, 36, 48, 60),
        published=_rows(
            paper=(2.431, 0.997, 2.287, 0.972, 2.418, 1.002, 2.425, 1.043),
            fedformer=(2.203, 2.272, 2.209, 2.545),
        ),
        published_elsewhere={60: _rows(paper=(2.185, 0.926, 2.155, 0.937, 2.333, 0.954, 2.018, 0.958))},
    ),
    "etth1": Benchmark(
        "ETTh1",
        "ETTh1",
        season=24,
        steps_per_month=30 * 24,
        published=_rows(
            itransformer=(0.386, 0.405, 0.441, 0.436, 0.487, 0.458, 0.503, 0.491),
            patchtst=(0.414, 0.419, 0.460, 0.445, 0.501, 0.466, 0.500, 0.488),
            dlinear=(0.386, 0.400, 0.437, 0.432, 0.481, 0.459, 0.519, 0.516),
            fedformer=(0.376, 0.415, 0.423, 0.446, 0.444, 0.462, 0.469, 0.492),
        ),
    ),
    "etth2": Benchmark(
        "ETTh2",
        "ETTh2",
        season=24,
        steps_per_month=30 * 24,
        published=_rows(
            itransformer=(0.297, 0.349, 0.380, 0.400, 0.428, 0.432, 0.427, 0.445),
            patchtst=(0.302, 0.348, 0.388, 0.400, 0.426, 0.433, 0.431, 0.446),
            dlinear=(0.333, 0.387, 0.477, 0.476, 0.594, 0.541, 0.831, 0.657),
        ),
    ),
    "ettm1": Benchmark("ETTm1", "ETTm1", season=96, steps_per_month=30 * 24 * 4),
}
