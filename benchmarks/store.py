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
    "host": ("store_host", "run"),
    "match": ("store_match", "run"),
    "policies": ("store_policies", "run"),
    "nvme": ("store_nvme", "run"),
    "index": ("store_nvme", "run_index"),
    "formats": ("store_formats", "run"),
    "lmcache": ("store_lmcache", "run"),
}


def sections(text: str) -> list[tuple[str, str]]:
    """Module and function of each section name."""
    names = [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in SECTIONS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: expected some of {','.join(SECTIONS)}")
    return [SECTIONS[name] for name in dict.fromkeys(names)]


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--only", type=sections, default=",".join(SECTIONS), help="sections to run, all by default")
    parser.add_argument("--dir", type=Path, default=DIRECTORY, help="where files go (default: %(default)s)")
    args = parser.parse_args()
    args.dir.mkdir(parents=True, exist_ok=True)
    report = Report(args.json, args.dir)
    for module, function in args.only:
        getattr(import_module(module), function)(report, args.quick)
        report.write()


if __name__ == "__main__":
    main()
