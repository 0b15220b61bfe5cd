"""A load generator: conversations, shared documents, unique prompts or a trace against an OpenAI-compatible server, or
against an engine in this process, to see what tiers are worth to a workload.

scripts     what is asked, and when: conversations of turns, as data
workloads   the scripts of each kind of traffic; traced: those of a published trace
texts       words of a wanted number of tokens, the same for the same seed
targets     who is asked: remote, a server (needs httpx); local, an engine in this process
driving     asks, and takes the time
rounds      the same kind of load again and again, on each target in turn
figures     what came of it: percentiles, throughput, goodput
comparing   two targets: ratios, and how sure they are
"""

from kvtier.bench.comparing import compared
from kvtier.bench.driving import Load, Run, Sample, measure
from kvtier.bench.figures import Figure, Slo, figures, parse_slo
from kvtier.bench.rounds import Rounds, measure_rounds, seeds_of
from kvtier.bench.scripts import Pace, Script
from kvtier.bench.targets import Failed, Target
from kvtier.bench.workloads import WORKLOADS, Conversations, SharedPrefix, Unrelated, Workload

__all__ = [
    "WORKLOADS",
    "Conversations",
    "Failed",
    "Figure",
    "Load",
    "Pace",
    "Rounds",
    "Run",
    "Sample",
    "Script",
    "SharedPrefix",
    "Slo",
    "Target",
    "Unrelated",
    "Workload",
    "compared",
    "figures",
    "measure",
    "measure_rounds",
    "parse_slo",
    "seeds_of",
]
