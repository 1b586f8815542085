"""Speculative decoding of ordinary Hugging Face causal models, exact at every temperature.

Three ways in, one loop behind them::

    from specattn.decoding import Vegas, generate

    output = generate(model, prompts, Vegas(gamma=6, ratio=0.07), max_new_tokens=256)
    output.sequences, output.statistics.total.mean_acceptance_length

    model.generate(ids, custom_generate=Vegas(gamma=6, ratio=0.07), max_new_tokens=256)

    generate(model, prompts, "plain", temperature=0.8, seed=1, on_tokens=print)

A method is a small description, such as `Vegas`; what it keeps during a run is its `Drafter`. To
add one, write both and put the method into `methods.METHODS`; the loop (`loop.decode`), the
acceptance, the sampling law, stopping and statistics are shared.
"""

try:
    import transformers  # noqa: F401
except ImportError as error:
    raise ImportError(
        "specattn.decoding needs transformers 5: pip install 'specattn[hf]'"
    ) from error

from specattn.decoding.generate import GenerationOutput, generate
from specattn.decoding.longspec import LongSpec
from specattn.decoding.loop import Draft, Drafter, Verified, decode
from specattn.decoding.medusa import Medusa
from specattn.decoding.method import Method, SpeculativeOutput
from specattn.decoding.methods import METHODS, parse_method
from specattn.decoding.penalty import ContextualPenalty
from specattn.decoding.plain import Plain
from specattn.decoding.poss import PosS
from specattn.decoding.prompt_lookup import PromptLookup
from specattn.decoding.quest import Quest
from specattn.decoding.sampling import TargetLaw
from specattn.decoding.sequences import StopRequest
from specattn.decoding.specextend import SpecExtend
from specattn.decoding.statistics import RequestStatistics, Statistics
from specattn.decoding.streaming import Streaming
from specattn.decoding.target import FAMILIES, Target
from specattn.decoding.token_recycling import TokenRecycling
from specattn.decoding.tokenswift import TokenSwift
from specattn.decoding.triforce import TriForce
from specattn.decoding.vegas import Vegas

__all__ = [
    "FAMILIES",
    "METHODS",
    "ContextualPenalty",
    "Draft",
    "Drafter",
    "GenerationOutput",
    "LongSpec",
    "Medusa",
    "Method",
    "Plain",
    "PosS",
    "PromptLookup",
    "Quest",
    "RequestStatistics",
    "SpecExtend",
    "SpeculativeOutput",
    "Statistics",
    "Streaming",
    "StopRequest",
    "Target",
    "TargetLaw",
    "TokenRecycling",
    "TokenSwift",
    "TriForce",
    "Vegas",
    "Verified",
    "decode",
    "generate",
    "parse_method",
]
