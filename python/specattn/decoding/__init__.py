"""Speculative decoding of ordinary Hugging Face causal models, exact at every temperature.

Three ways in, one loop behind them::

    from specattn.decoding import Vegas, generate

    output = generate(model, prompts, max_new_tokens=256)  # by whatever is fastest
    output.sequences, output.statistics.total.mean_acceptance_length

    model.generate(ids, custom_generate=Vegas(gamma=6, ratio=0.07), max_new_tokens=256)

    generate(model, prompts, "plain", temperature=0.8, seed=1, on_tokens=print)

A method is a small description, such as `Vegas`; what it keeps during a run is its `Drafter`. To
add one, write both: a method that is defined with a name joins `METHODS`. The loop (`loop.decode`),
acceptance, sampling, stopping and statistics are shared.
"""

try:
    import transformers  # noqa: F401
except ImportError as error:
    raise ImportError(
        "specattn.decoding needs transformers 5: pip install 'specattn[hf]'"
    ) from error

from specattn.decoding.calibrate import calibrate
from specattn.decoding.engine.contract import Draft, DraftContext, Drafter, Verified
from specattn.decoding.engine.loop import decode
from specattn.decoding.engine.method import Method, SpeculativeOutput
from specattn.decoding.engine.target import Target
from specattn.decoding.engine.workspace import release
from specattn.decoding.generate import GenerationOutput, generate
from specattn.decoding.methods import METHODS, parse_method
from specattn.decoding.methods.auto import Auto
from specattn.decoding.methods.cast import Cast
from specattn.decoding.methods.dflash import DFlash, JetFlow
from specattn.decoding.methods.eagle3 import Eagle3
from specattn.decoding.methods.longspec import LongSpec
from specattn.decoding.methods.medusa import Medusa
from specattn.decoding.methods.mtp import Mtp
from specattn.decoding.methods.plain import Plain
from specattn.decoding.methods.poss import PosS
from specattn.decoding.methods.prompt_lookup import PromptLookup
from specattn.decoding.methods.quest import Quest
from specattn.decoding.methods.specextend import SpecExtend
from specattn.decoding.methods.streaming import Streaming
from specattn.decoding.methods.suffix import Suffix
from specattn.decoding.methods.token_recycling import TokenRecycling
from specattn.decoding.methods.tokenswift import TokenSwift
from specattn.decoding.methods.triforce import TriForce
from specattn.decoding.methods.vegas import Vegas
from specattn.decoding.model.families import FAMILIES
from specattn.decoding.passes.proving import prove
from specattn.decoding.text.penalty import ContextualPenalty
from specattn.decoding.text.rounds import Round
from specattn.decoding.text.sampling import Sampler
from specattn.decoding.text.sequences import StopRequest
from specattn.decoding.text.statistics import RequestStatistics, Statistics

__all__ = [
    "DFlash",
    "FAMILIES",
    "METHODS",
    "Auto",
    "Cast",
    "ContextualPenalty",
    "Draft",
    "DraftContext",
    "Drafter",
    "Eagle3",
    "GenerationOutput",
    "JetFlow",
    "LongSpec",
    "Medusa",
    "Method",
    "Plain",
    "Mtp",
    "PosS",
    "PromptLookup",
    "Quest",
    "RequestStatistics",
    "Round",
    "SpecExtend",
    "SpeculativeOutput",
    "Statistics",
    "Streaming",
    "Suffix",
    "StopRequest",
    "Target",
    "Sampler",
    "TokenRecycling",
    "TokenSwift",
    "TriForce",
    "Vegas",
    "Verified",
    "calibrate",
    "decode",
    "generate",
    "parse_method",
    "prove",
    "release",
]
