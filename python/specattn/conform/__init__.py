"""Whether an engine keeps its promise that drafts change nothing: answers held side by side."""

from specattn.conform.endpoint import Answer, Endpoint, Engine, Place, Request
from specattn.conform.judge import Finding, Verdict, judge, noise_of, parting

__all__ = [
    "Answer",
    "Endpoint",
    "Engine",
    "Finding",
    "Place",
    "Request",
    "Verdict",
    "judge",
    "noise_of",
    "parting",
]
