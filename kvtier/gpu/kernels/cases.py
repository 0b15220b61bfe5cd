"""What a machine with a GPU runs: `checks` against references, then `measures`. See `benchmarks/gpu.py`.

for check in checks():             check.run(device) -> Checked(error, tolerance), .passed
for measure in measures(sizes):    work = measure.prepare(device); seconds(work.run, device); work.nbytes, work.flops
"""

from kvtier.gpu.kernels.checks import Check, Checked, checks
from kvtier.gpu.kernels.measures import Measure, Sizes, Work, measures, seconds

__all__ = ["Check", "Checked", "Measure", "Sizes", "Work", "checks", "measures", "seconds"]
