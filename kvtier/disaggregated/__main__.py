"""`python -m kvtier.disaggregated`: see `PrefillProcess`."""

import sys

from kvtier.disaggregated.running import run_child

if __name__ == "__main__":
    sys.exit(run_child())
