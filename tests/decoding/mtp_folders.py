"""Random MTP heads by transformers' own model of them, and folders that hold them as published."""

import copy
import re

import torch
from safetensors.torch import save_file
from transformers.modeling_layers import MtpModel

from specattn.decoding.model.mtp import LAYOUTS
from specattn.drafters import MtpDrafter

_EXPERTS = re.compile(r"(.*experts)\.(gate_up_proj|down_proj)")


def random_mtp(model, seed=0):
    """Return transformers' MTP model beside `model`, whose parts all matter."""
    configured = copy.copy(model)  # its configuration says of a head what a published one's does
    configured.config = copy.deepcopy(model.config)
    configured.config.num_mtp_layers = 1
    configured.config._experts_implementation = "eager"
    if getattr(configured.config, "layer_types", None):
        configured.config.mtp_layer_types = ["full_attention"]
    mtp = MtpModel(configured, 1).to(model.dtype).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in mtp.layers.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(1 + 0.3 * noise if "norm" in name else 0.2 * noise)
    return mtp


def published(mtp, family, depth):
    """Return the head's weights as the checkpoints of a family call and keep them."""
    layout = LAYOUTS[family].of(depth)
    own = {name: x.clone() for name, x in mtp.layers[0].state_dict().items()}
    project = own.pop("eh_proj.weight")
    if layout.feature_first:
        project = torch.cat([*reversed(project.chunk(2, 1))], 1)
    tensors = {
        layout.embedding_norm: own.pop("enorm.weight"),
        layout.feature_norm: own.pop("hnorm.weight"),
        layout.norm: own.pop("post_norm.weight"),
        layout.project: project,
    }
    for name, x in own.items():
        name = layout.layer + name.removeprefix("mtp_block.")
        if (experts := _EXPERTS.fullmatch(name)) is None:
            tensors[name] = x
            continue
        for number, one in enumerate(x):
            both = experts[2] == "gate_up_proj"
            parts = zip(("gate", "up"), one.chunk(2), strict=True) if both else [("down", one)]
            for part, weight in parts:
                tensors[f"{experts[1]}.{number}.{part}_proj.weight"] = weight
    return {name: x.contiguous().clone() for name, x in tensors.items()}


def with_head(model, folder, family, mtp=None):
    """Save a model with a random head beside it, and return both: the model loaded anew."""
    mtp = random_mtp(model) if mtp is None else mtp
    model.save_pretrained(folder)
    tensors = published(mtp, family, model.config.num_hidden_layers)
    save_file(tensors, folder / "mtp.safetensors", {"format": "pt"})
    eager = {"experts_implementation": "eager"}  # others know no float64
    return type(model).from_pretrained(folder, dtype=model.dtype, **eager).eval(), mtp


def random_drafter(model, *, seed=0, dtype=torch.float32):
    """Return a head of one's own for `model` whose parts all matter."""
    drafter = MtpDrafter.for_target(model, target="tiny").to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(1 + 0.3 * noise if "norm" in name else 0.2 * noise)
    return drafter.eval()


def as_transformers(model, drafter):
    """Return transformers' MTP model with the weights of a head of one's own."""
    mtp = random_mtp(model)
    names = {"shared_head.norm.weight": "post_norm.weight"}
    ends = ("enorm.weight", "hnorm.weight", "eh_proj.weight")
    weights = {
        names.get(name, name if name in ends else f"mtp_block.{name}"): x
        for name, x in drafter.state_dict().items()
    }
    mtp.layers[0].load_state_dict(weights)
    return mtp
