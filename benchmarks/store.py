"""The block store beside its peers: every tier, format and policy, each row with a peer measured in the same rounds.

    python benchmarks/store.py [--only NAME[,NAME]] [--sizes SIZE[,SIZE]] [--quick] [--json PATH] [--dir PATH]

Names: host (memcpy), match, policies (OrderedDict), nvme and index (fio), formats (memcpy), lmcache (LMCache 0.5.6's
CPU and local-disk backends, in an environment of their own: see benchmarks/requirements-lmcache.txt).
`--dir` should lie on the disk that is to be measured. `--sizes 4MiB` measures host and nvme with blocks of these sizes
only: some disks are throttled after a few gigabytes, and then short runs, one size each, say more than a long one.
"""

import argparse
import re
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
SIZED = ("host", "nvme")
UNITS = {"KiB": 1 << 10, "MiB": 1 << 20}


def sections(text: str) -> list[str]:
    """Names of sections, each once."""
    names = [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in SECTIONS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: expected some of {','.join(SECTIONS)}")
    return list(dict.fromkeys(names))


def sizes(text: str) -> list[int]:
    """Bytes of each size, such as 256KiB or 4MiB."""
    found = [re.fullmatch(r"([1-9]\d*) ?(KiB|MiB)", size.strip()) for size in text.split(",")]
    nbytes = [int(match[1]) * UNITS[match[2]] for match in found if match]
    if len(nbytes) < len(found) or any(size % 4096 or size > 16 << 20 for size in nbytes):
        raise argparse.ArgumentTypeError(f"{text!r}: expected sizes like 256KiB,4MiB: whole 4 KiB, 16 MiB at most")
    return nbytes


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--only", type=sections, default=",".join(SECTIONS), help="sections to run, all by default")
    parser.add_argument("--sizes", type=sizes, help=f"block sizes of {' and '.join(SIZED)}, such as 256KiB,4MiB")
    parser.add_argument("--dir", type=Path, default=DIRECTORY, help="where files go (default: %(default)s)")
    args = parser.parse_args()
    args.dir.mkdir(parents=True, exist_ok=True)
    report = Report(args.json, args.dir)
    for name in args.only:
        module, function = SECTIONS[name]
        chosen = {"sizes": args.sizes} if args.sizes and name in SIZED else {}
        getattr(import_module(module), function)(report, args.quick, **chosen)
        report.write()


if __name__ == "__main__":
    main()
