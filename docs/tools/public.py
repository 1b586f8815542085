"""The modules whose names are public."""

MODULES = (
    "specattn",
    "specattn.acceptance",
    "specattn.decoding",
    "specattn.distributed",
    "specattn.drafters",
    "specattn.integrations.transformers",
    "specattn.integrations.vllm",
    "specattn.planning",
    "specattn.training",
    "specattn.tuning",
)
