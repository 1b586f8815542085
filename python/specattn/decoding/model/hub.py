"""Models of the Hub, by transformers' own progress and offline rules (HF_HUB_OFFLINE, HF_HOME)."""

from __future__ import annotations

from pathlib import Path

# What is read of a model, drafters in its folders included; some have the weights twice.
OF_MODELS = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
_NOT_READ = ["consolidated*", "original/*", "onnx/*"]


def fetched(hub_id: str, patterns: tuple[str, ...] = OF_MODELS) -> Path:
    """Return the folder of a model of the Hub, with such of its files; ValueError without them."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        found = snapshot_download(hub_id, allow_patterns=[*patterns], ignore_patterns=_NOT_READ)
    except LocalEntryNotFoundError:
        raise ValueError(
            f"{hub_id} is no folder here, was not downloaded yet, and the Hub cannot be reached; "
            f"where there is a network: hf download {hub_id}"
        ) from None
    except (HfHubHTTPError, OSError) as error:
        told = f"{hub_id} is no folder here, and cannot be had from the Hub: {error}"
        raise ValueError(told) from None
    return Path(found)
