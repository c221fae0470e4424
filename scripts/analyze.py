"""
Analyse a trained model; the first argument says how.

    python scripts/analyze.py lengthening --model_name_or_path runs/quickstart
    python scripts/analyze.py lengthening --model_name_or_path runs/mine --train_file a.txt --validation_file b.txt
    python scripts/analyze.py incoherence --tasks pathfinder
    python scripts/analyze.py lra
    python scripts/analyze.py tried --results_dir model_cards/results

lengthening: what a pre-trained SKTformer loses when it is lengthened, without further training.
incoherence: how evenly energy is spread over what the attention reads, before and after the Fourier convolution.
lra: what reproduce.py lra_TASK has written of the tasks of Long Range Arena, as one table with means.
tried: what reproduce.py improvements and the like have written of changes of the model, as one table.

The paper's other analyses are tables of runs, which reproduce.py makes: lra_impact_TASK, lra_ablation_TASK, lra_noise
and lra_curves_TASK.
"""

import sys

from experiments.analyses import incoherence, lengthening, lra, tried
from experiments.arguments import UserError, parse_args, run_script
from experiments.results import ResultsArguments, check_writable


ANALYSES = {
    module.__name__.rpartition(".")[2]: (module.ARGUMENTS, module.analyze)
    for module in (lengthening, incoherence, lra, tried)
}
# The paper's other analyses, each a table of runs.
TABLES = {
    "impact": "lra_impact_TASK",
    "ablation": "lra_ablation_TASK",
    "noise": "lra_noise",
    "curves": "lra_curves_TASK",
}


def main() -> None:
    name, *flags = sys.argv[1:] or [""]
    if name in TABLES:
        raise UserError(f"`{name}` is a table of runs; write `python scripts/reproduce.py {TABLES[name]}`.")
    if name not in (*ANALYSES, "-h", "--help"):
        raise UserError(f"There is no analysis `{name}`; write {' or '.join(ANALYSES)} first, then its flags.")
    groups, analyze = ANALYSES.get(name, ((), print))
    arguments = parse_args(groups, flags if groups else ["--help"], __doc__)
    for places in (group for group in arguments if isinstance(group, ResultsArguments)):
        check_writable(places.results_dir)
    print(analyze(*arguments))


if __name__ == "__main__":
    run_script(main)
