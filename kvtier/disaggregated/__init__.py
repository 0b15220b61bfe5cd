"""Disaggregated prefill and decode: two engine processes, KV handed over through a shared directory.

A prompt's way:

    decode side                                     prefill side
    receiving.py  worth it? submit ------------->   server.py   computes it, in chunks, as any request
                                                    store       writes each full block through
                  prefetched into host <---------   jobs.py     sees it in the directory, and says so
    llm.py        all there: the engine loads it, computes the last tokens, decodes
                  peer dead, late, refused: the engine computes what did not come
"""

from kvtier.disaggregated.client import PrefillClient
from kvtier.disaggregated.identity import shared_directory
from kvtier.disaggregated.llm import DisaggregatedLLM, PrefilledLLM
from kvtier.disaggregated.receiving import HandoverOptions
from kvtier.disaggregated.running import serve_prefill
from kvtier.disaggregated.server import PrefillServer

__all__ = [
    "DisaggregatedLLM",
    "HandoverOptions",
    "PrefillClient",
    "PrefillServer",
    "PrefilledLLM",
    "serve_prefill",
    "shared_directory",
]
