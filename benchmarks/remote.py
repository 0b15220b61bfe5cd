"""Remote tiers beside the stock clients of the same servers, in the same rounds.

    python benchmarks/remote.py [--only NAME[,NAME]] [--quick] [--json PATH]

Each name is a kind of server, started for the run on this machine: valkey (valkey-py); or objects: a directory (plain
files). Rows ending in `.cpu` are CPU seconds of this process per GB, all threads: unlike GB/s they hardly depend on
what else the machine does.
"""

import argparse
from importlib import import_module

from harness import Report, arguments

SECTIONS = {"valkey": "remote_valkey", "objects": "remote_objects"}


def sections(text: str) -> list[str]:
    """Names of sections, each once."""
    names = [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in SECTIONS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: expected some of {','.join(SECTIONS)}")
    return list(dict.fromkeys(names))


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--only", type=sections, default=",".join(SECTIONS), help="sections to run, all by default")
    args = parser.parse_args()
    report = Report(args.json)
    for name in args.only:
        import_module(SECTIONS[name]).run(report, args.quick)
        report.write()


if __name__ == "__main__":
    main()
