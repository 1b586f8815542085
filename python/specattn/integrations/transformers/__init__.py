"""specattn under transformers: one import, then ``attn_implementation="specattn"``.

    import specattn.integrations.transformers

    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="specattn")

Every model that honours transformers' attention interface then attends through the primitives, in
its own `generate` and with its own caches. What they cannot express goes where ``"sdpa"`` would
send it, with one warning that says why (docs/transformers.md).

`Cache` is the one thing more that long contexts want: transformers' default cache copies all it
holds for every token.

    model.generate(ids, past_key_values=specattn.integrations.transformers.Cache(model.config))
"""

from transformers import AttentionInterface, AttentionMaskInterface

from .attention import attention_forward
from .cache import Cache
from .masks import mask

NAME = "specattn"
"""What transformers calls our attention and our masks."""

AttentionInterface.register(NAME, attention_forward)
AttentionMaskInterface.register(NAME, mask)

__all__ = ["NAME", "Cache"]
