"""`python -m model_cards RUN_DIR` writes the model card of a finished run and prints its path.

Exit status: 0 written, 2 bad input.
"""

import argparse
import sys
from collections.abc import Sequence

from .card import write_card


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse arguments and write one card; 2 after one `error: …` line on stderr."""
    options = _parser().parse_args(arguments)
    try:
        path = write_card(**vars(options))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(path)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m model_cards",
        description="Write the model card of a finished run from its record.",
    )
    parser.add_argument(
        "run_dir",
        metavar="RUN_DIR",
        help="run directory: config.yaml, run.json, log.jsonl, checkpoint/",
    )
    parser.add_argument(
        "--fit",
        metavar="FIT_JSON",
        help="φ of the run's grid, from `python -m scaling fit TABLE --json` (default: fit.json in the "
        "folder above RUN_DIR or in one beside it)",
    )
    parser.add_argument(
        "--license",
        metavar="ID",
        help="the Hub's identifier, e.g. apache-2.0, or other (default: the card says that none is stated)",
    )
    parser.add_argument("--license-name", metavar="NAME", help="name of an `other` licence")
    parser.add_argument(
        "--license-link", metavar="LINK", help="address of its text, or LICENSE for a file"
    )
    parser.add_argument("--author", metavar="NAME", help="who trained the model")
    parser.add_argument(
        "--repo-id", metavar="OWNER/NAME", help="Hub repository that the card will stand in"
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="where the card goes; replaced if it exists (default: RUN_DIR/checkpoint/README.md)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
