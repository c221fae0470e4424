"""
Analyse a trained model; the first argument says how.

    python scripts/analyze.py lengthening --model_name_or_path runs/quickstart
    python scripts/analyze.py lengthening --model_name_or_path runs/mine --train_file a.txt --validation_file b.txt

lengthening: what a pre-trained SKTformer loses when it is lengthened, without further training.
"""

import sys

from experiments.analyses import lengthening
from experiments.arguments import UserError, parse_args, run_script


ANALYSES = {"lengthening": (lengthening.ARGUMENTS, lengthening.analyze)}


def main() -> None:
    name, *flags = sys.argv[1:] or [""]
    if name not in (*ANALYSES, "-h", "--help"):
        raise UserError(f"There is no analysis `{name}`; write {' or '.join(ANALYSES)} first, then its flags.")
    groups, analyze = ANALYSES.get(name, ((), print))
    print(analyze(*parse_args(groups, flags if groups else ["--help"], __doc__)))


if __name__ == "__main__":
    run_script(main)
