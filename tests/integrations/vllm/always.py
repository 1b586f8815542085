"""Vegas without its switch: tests shall not depend on the clock."""

from specattn.integrations.vllm.vegas import Vegas


class AlwaysVegas(Vegas):
    """Drafts in every round, on so few tokens that what is selected matters."""

    switch = False
    min_tokens = 32
