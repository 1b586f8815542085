"""Train the embedded target: a short PyTorch loop, sized for two CPU cores.

Three things make it affordable. Short contexts come first and the full one last. Matrices are
trained with Muon, which needs far fewer tokens than AdamW. And attention is computed in causal
blocks of matrix products (`blocked_attention`), more than twice as fast as the fused kernel on
short rows.

Three things make it run at 32k tokens though it never reads more than a row at once. The rope base
is large, so that the slow half of the rotations barely turns. Some rows of the later stages are cut
into segments whose positions are spread over all 32k (PoSE, Zhu et al. 2024, arXiv:2309.10400 §3),
so that every angle is seen. And rows keep a file together, and some repeat a passage: there is
something to look back at.
"""

import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, Qwen3Config, Qwen3ForCausalLM

from specattn.files import write_atomically

ATTENTION_BLOCK = 128


@dataclass(frozen=True)
class Stage:
    """A stretch of training at one context length.

    ``spread`` is the share of rows with far positions, ``echo`` of those that repeat a passage.
    """

    context: int
    steps: int
    spread: float = 0.0
    echo: float = 0.0


@dataclass(frozen=True)
class Recipe:
    """Everything that decides what comes out; the defaults made the shipped checkpoint."""

    seed: int = 0
    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 1024
    layers: int = 6
    max_position: int = 32768
    rope_theta: float = 1e6
    stages: tuple = (
        Stage(context=256, steps=650),
        Stage(context=512, steps=50, spread=0.25),
        Stage(context=1024, steps=240, spread=0.5),
        Stage(context=8192, steps=30, spread=0.5, echo=0.5),
    )
    batch_tokens: int = 8192
    muon_lr: float = 0.02
    adam_lr: float = 3e-3
    weight_decay: float = 0.1
    warmup_steps: int = 30
    decay_share: float = 0.278
    compile: bool = True

    @property
    def steps(self):
        """Optimizer steps of all stages."""
        return sum(stage.steps for stage in self.stages)

    def config(self, eos):
        """Architecture of the model, with ``eos`` as its end-of-text token."""
        return Qwen3Config(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.layers,
            num_attention_heads=8,
            num_key_value_heads=2,
            head_dim=64,
            tie_word_embeddings=True,
            max_position_embeddings=self.max_position,
            rope_parameters={"rope_type": "default", "rope_theta": self.rope_theta},
            bos_token_id=eos,
            eos_token_id=eos,
        )

    def learning_rate(self, step):
        """Factor on both learning rates: a short rise, a plateau, a straight line to zero."""
        rise = min(1.0, (step + 1) / self.warmup_steps)
        return rise * min(1.0, (self.steps - step) / (self.decay_share * self.steps))


@torch.compiler.disable  # one kernel per block and shape: compiling takes longer than it saves
def blocked_attention(module, query, key, value, mask, scaling, **_):
    """Causal attention as plain matrix products over blocks of queries.

    Parameters
    ----------
    query : Tensor [B, Hq, S, D]
    key, value : Tensor [B, Hk, S, D]
    mask : None
        Every row is causal; S is a multiple of the block.

    Returns
    -------
    tuple of Tensor [B, S, Hq, D] and None
    """
    length = query.shape[2]
    block = min(ATTENTION_BLOCK, length)
    future = query.new_full((block, block), -torch.inf).triu(1)
    query = (query * scaling).unflatten(1, (key.shape[1], -1))
    outputs = []
    for start in range(0, length, block):
        end = start + block
        # All query heads of a KV head form one tall matrix: K and V are read once.
        logits = query[:, :, :, start:end].flatten(2, 3) @ key[:, :, :end].mT
        logits.unflatten(2, (-1, block))[..., start:] += future
        outputs.append((logits.softmax(-1) @ value[:, :, :end]).unflatten(2, (-1, block)))
    return torch.cat(outputs, 3).flatten(1, 2).transpose(1, 2), None


AttentionInterface.register("blocked", blocked_attention)


def batches(documents, stage, batch_tokens, seed):
    """Yield batches of rows without end: files in random order, cut at the context, shuffled.

    Parameters
    ----------
    documents : list of Tensor
        Token ids of each file, end-of-text first.
    stage : Stage
    batch_tokens : int
        Tokens in a batch.
    seed : int

    Yields
    ------
    Tensor [batch_tokens // context, context + 1]
        Inputs and, shifted by one, labels.
    """
    rng = torch.Generator().manual_seed(seed)
    rows = max(1, batch_tokens // stage.context)
    while True:
        order = torch.randperm(len(documents), generator=rng)
        stream = torch.cat([documents[i] for i in order])
        # A random start moves the cuts, so that each pass sees other rows.
        stream = stream[int(torch.randint(stage.context, (), generator=rng)) :]
        table = stream.unfold(0, stage.context + 1, stage.context)
        shuffled = torch.randperm(len(table), generator=rng)
        for chosen in shuffled[: len(table) // rows * rows].split(rows):
            yield table[chosen]


def spread_positions(rows, stage, max_position, rng):
    """Positions [rows, context]; some rows jump ahead at random places, up to ``max_position``."""
    positions = torch.arange(stage.context).repeat(rows, 1)
    for row in positions:
        if torch.rand((), generator=rng) < stage.spread:
            jumps = int(torch.randint(1, 5, (), generator=rng))
            cuts = torch.randint(stage.context, (jumps,), generator=rng)
            room = torch.rand((), generator=rng) * (max_position - stage.context)
            shares = torch.rand(jumps, generator=rng)
            for cut, share in zip(cuts, shares / shares.sum(), strict=True):
                row[cut:] += int(room * share)
    return positions


def echo_passages(rows, stage, rng):
    """Overwrite, in some of ``rows``, a late passage by an earlier one: this teaches to copy."""
    for row in rows:
        if stage.echo and torch.rand((), generator=rng) < stage.echo:
            length = int(torch.randint(stage.context // 16, stage.context // 4, (), generator=rng))
            places = torch.randint(len(row) - 2 * length, (2,), generator=rng).sort().values
            source, target = int(places[0]), int(places[1]) + length
            row[target : target + length] = row[source : source + length].clone()
    return rows


def optimizers(model, recipe):
    """Muon for the matrices inside the layers, AdamW for the embedding and the norms."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    inside = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in inside]
    decay = recipe.weight_decay
    return (
        torch.optim.Muon(matrices, lr=recipe.muon_lr, weight_decay=decay),
        torch.optim.AdamW(others, lr=recipe.adam_lr, betas=(0.9, 0.95), weight_decay=0.0),
    )


def cross_entropy(hidden, embedding, labels):
    """Mean loss in nats; compiled, the logits are never held in float32."""
    return F.cross_entropy((hidden @ embedding.T).flatten(0, 1).float(), labels.flatten())


class Resumable:
    """A training run that a `state_file` keeps: model, optimizers, steps, seconds, losses."""

    def __init__(self, model, optimizers, state_file):
        self.model, self.optimizers, self.state_file = model, optimizers, Path(state_file)
        self.step, self.seconds, self.losses = 0, 0.0, []
        if self.state_file.exists():
            self._resume()

    def _resume(self):
        state = torch.load(self.state_file, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.seconds, self.losses = state["step"], state["seconds"], state["losses"]

    def save(self):
        """Write the training state; an interruption leaves the old one."""
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "step": self.step,
            "seconds": self.seconds,
            "losses": self.losses,
        }
        write_atomically(self.state_file, lambda partial: torch.save(state, partial))


class Trainer(Resumable):
    """Model, optimizers and step count, saved and resumed together.

    Parameters
    ----------
    recipe : Recipe
    documents : list of Tensor
        Token ids of each training file, end-of-text first.
    state_file : Path
        Where the training state is kept; training goes on from it when it exists.
    """

    def __init__(self, recipe, documents, state_file):
        torch.manual_seed(recipe.seed)
        self.recipe, self.documents = recipe, documents
        config = recipe.config(eos=int(documents[0][0]))
        config._attn_implementation = "blocked"
        model = Qwen3ForCausalLM(config)
        super().__init__(model, optimizers(model, recipe), state_file)
        self.loss = cross_entropy
        if recipe.compile:
            self.loss = torch.compile(cross_entropy, dynamic=False)
            for layer in self.model.model.layers:
                layer.compile(dynamic=False)

    def run(self, save_every=100):
        """Train to the last step and return the model."""
        first = 0
        for number, stage in enumerate(self.recipe.stages):
            done = max(0, self.step - first)
            if done < stage.steps:
                self._run_stage(stage, seed=self.recipe.seed + number, done=done, every=save_every)
            first += stage.steps
        self.save()
        return self.model

    def _run_stage(self, stage, seed, done, every):
        rng = torch.Generator().manual_seed(seed)
        source = batches(self.documents, stage, self.recipe.batch_tokens, seed)
        for index in range(stage.steps):
            rows = next(source)
            rows = echo_passages(rows, stage, rng)
            positions = spread_positions(len(rows), stage, self.recipe.max_position, rng)
            if index < done:  # replayed, so that a resumed run sees what an unbroken one sees
                continue
            start = time.perf_counter()
            self.losses.append(self._step(rows, positions))
            elapsed = time.perf_counter() - start
            self.step, self.seconds = self.step + 1, self.seconds + elapsed
            if self.step % 10 == 0:
                self._report(stage, rows.shape[0] * stage.context / elapsed)
            if self.step % every == 0:
                self.save()

    def _step(self, rows, positions):
        factor = self.recipe.learning_rate(self.step)
        peaks = (self.recipe.muon_lr, self.recipe.adam_lr)
        with torch.autocast("cpu", torch.bfloat16):
            hidden = self.model.model(rows[:, :-1], position_ids=positions, use_cache=False)[0]
            loss = self.loss(hidden, self.model.lm_head.weight, rows[:, 1:])
        loss.backward()
        for optimizer, peak in zip(self.optimizers, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * factor
            optimizer.step()
            optimizer.zero_grad()
        return loss.item()

    def _report(self, stage, speed):
        recent = sum(self.losses[-10:]) / len(self.losses[-10:])
        print(
            f"step {self.step}/{self.recipe.steps}  context {stage.context}  loss {recent:.3f}  "
            f"{speed:.0f} tokens/s  {self.seconds / 60:.1f} min",
            flush=True,
        )
