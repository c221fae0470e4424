"""The public series that forecasters are compared on: how each is read and split, and what was published on it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


HUB_DATASET = "thuml/Time-Series-Library"
HORIZONS = (96, 192, 336, 720)
# Published rows: MSE and MAE at each horizon of a benchmark, or MSE alone.
Published = Mapping[str, Sequence[Sequence[float]]]
PAPER = "SKTformer (paper)"
# MSE/MAE or MSE alone at the four horizons, by series and context. The paper's Table 2, of which FEDformer's rows are
# too, but on ETTh1, where they are its own paper's; the other rows as the papers on iTransformer and its successors
# reprint them.
_PUBLISHED = """
ETTm2-96        SKTformer     .192/.283 .255/.324 .324/.364 .431/.433
ETTm2-96        iTransformer  .180/.264 .250/.309 .311/.348 .412/.407
ETTm2-96        PatchTST      .175/.259 .241/.302 .305/.343 .402/.400
ETTm2-96        DLinear       .193/.292 .284/.362 .369/.427 .554/.522
ETTm2-96        FEDformer     .203 .269 .325 .421
ETTh1-96        iTransformer  .386/.405 .441/.436 .487/.458 .503/.491
ETTh1-96        PatchTST      .414/.419 .460/.445 .501/.466 .500/.488
ETTh1-96        DLinear       .386/.400 .437/.432 .481/.459 .519/.516
ETTh1-96        FEDformer     .376/.415 .423/.446 .444/.462 .469/.492
ETTh2-96        iTransformer  .297/.349 .380/.400 .428/.432 .427/.445
ETTh2-96        PatchTST      .302/.348 .388/.400 .426/.433 .431/.446
ETTh2-96        DLinear       .333/.387 .477/.476 .594/.541 .831/.657
Exchange-96     SKTformer     .086/.204 .188/.292 .356/.433 .727/.669
Exchange-96     iTransformer  .086/.206 .177/.299 .331/.417 .847/.691
Exchange-96     PatchTST      .088/.205 .176/.299 .301/.397 .901/.714
Exchange-96     FEDformer     .139 .256 .426 1.090
Weather-96      SKTformer     .182/.262 .228/.306 .295/.355 .383/.418
Weather-96      iTransformer  .174/.214 .221/.254 .278/.296 .358/.347
Weather-96      PatchTST      .177/.218 .225/.259 .278/.297 .354/.348
Weather-96      FEDformer     .217 .276 .339 .403
Electricity-96  SKTformer     .218/.332 .259/.361 .267/.367 .293/.385
Electricity-96  iTransformer  .148/.240 .162/.253 .178/.269 .225/.317
Electricity-96  DLinear       .197/.282 .196/.285 .209/.301 .245/.333
Electricity-96  FEDformer     .183 .195 .212 .231
Traffic-96      SKTformer     .592/.352 .583/.343 .598/.346 .641/.397
Traffic-96      iTransformer  .395/.268 .417/.276 .433/.283 .467/.302
Traffic-96      PatchTST      .526/.347 .522/.332 .517/.334 .552/.352
Traffic-96      DLinear       .650/.396 .598/.370 .605/.373 .645/.394
Traffic-96      FEDformer     .562 .562 .570 .596
ILI-36          SKTformer     2.431/.997 2.287/.972 2.418/1.002 2.425/1.043
ILI-36          FEDformer     2.203 2.272 2.209 2.545
ILI-60          SKTformer     2.185/.926 2.155/.937 2.333/.954 2.018/.958
"""


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
        num_steps (`int`, *optional*): Time steps of the others, whose number says where they are split.
        context_length (`int`), horizons (`tuple` of `int`): Time steps that are read and forecast.
    """

    title: str
    file: str
    season: int
    steps_per_month: int | None = None
    num_steps: int | None = None
    context_length: int = 96
    horizons: tuple[int, ...] = HORIZONS

    @property
    def published(self) -> Published:
        """The published rows for contexts of `context_length`."""
        return _published(f"{self.title}-{self.context_length}")

    def published_at(self, horizon: int, context_length: int) -> dict[str, dict[str, float]]:
        """The published rows for a horizon, MSE and, where it is known, MAE; none for another context than theirs."""
        if horizon not in self.horizons:
            return {}
        place, rows = self.horizons.index(horizon), _published(f"{self.title}-{context_length}")
        return {name: dict(zip(("mse", "mae"), row[place], strict=False)) for name, row in rows.items()}


def _published(series: str) -> Published:
    """The published rows of a series with a context, by the name of the model."""
    found = [line.split()[1:] for line in _PUBLISHED.splitlines() if line.split()[:1] == [series]]
    names = {name: PAPER if name == "SKTformer" else f"{name} (published)" for name, *_ in found}
    return {names[name]: [tuple(map(float, cell.split("/"))) for cell in cells] for name, *cells in found}


BENCHMARKS = {
    "ettm2": Benchmark("ETTm2", "ETTm2", season=96, steps_per_month=30 * 24 * 4),
    "electricity": Benchmark("Electricity", "electricity", season=24, num_steps=26_304),
    "exchange": Benchmark("Exchange", "exchange_rate", season=5, num_steps=7588),
    "traffic": Benchmark("Traffic", "traffic", season=24, num_steps=17_544),
    "weather": Benchmark("Weather", "weather", season=144, num_steps=52_696),
    "ili": Benchmark(
        "ILI", "national_illness", season=52, num_steps=966, context_length=36, horizons=(24, 36, 48, 60)
    ),
    "etth1": Benchmark("ETTh1", "ETTh1", season=24, steps_per_month=30 * 24),
    "etth2": Benchmark("ETTh2", "ETTh2", season=24, steps_per_month=30 * 24),
    "ettm1": Benchmark("ETTm1", "ETTm1", season=96, steps_per_month=30 * 24 * 4),
}
