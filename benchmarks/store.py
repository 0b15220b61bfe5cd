"""The block store beside its peers: every tier, format and policy, each row with a peer measured in the same rounds.

    python benchmarks/store.py [--only NAME[,NAME]] [--quick] [--json PATH] [--dir PATH]

Names: host (memcpy), match, policies (OrderedDict), nvme and index (fio), formats (memcpy), lmcache (LMCache 0.5.6's
CPU and local-disk backends, in an environment of their own: see benchmarks/requirements-lmcache.txt).
`--dir` should lie on the disk that is to be measured.
"""

import argparse
from importlib import import_module
from pathlib import Path

from harness import DIRECTORY, Report, arguments

SECTIONS = {
    "host": "store_host",
    "match": "store_match",
    "policies": "store_policies",
    "nvme": "store_nvme",
    "index": "store_nvme",
    "formats": "store_formats",
    "lmcache": "store_lmcache",
}


def modules(text: str) -> list[str]:
    """The modules behind section names; sections of one module are run once."""
    names = [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in SECTIONS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: expected some of {','.join(SECTIONS)}")
    return list(dict.fromkeys(SECTIONS[name] for name in names))


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--only", type=modules, default=",".join(SECTIONS), help="sections to run, all by default")
    parser.add_argument("--dir", type=Path, default=DIRECTORY, help="where files go (default: %(default)s)")
    args = parser.parse_args()
    args.dir.mkdir(parents=True, exist_ok=True)
    report = Report(args.json, args.dir)
    for module in args.only:
        import_module(module).run(report, args.quick)
        report.write()


if __name__ == "__main__":
    main()
