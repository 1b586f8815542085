"""Convert the embedded target to a hybrid: four of its six layers keep a state instead of keys.

    python convert.py --out DIR

Embedding, head, norms, MLPs and two attending layers are the target's, exactly: an output gate of
zeros is a half, so the projection behind it is doubled. The gated delta layers learn first what
attention adds in their place, each given the target's own input; then the whole model learns the
target's distribution and the text. State is kept in ``DIR/work``; the same command goes on from it.
"""

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from build import command_line, evaluate, write_checkpoint
from corpus import read_texts, training_files
from train import Resumable, Stage, batches, echo_passages
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3_5ForCausalLM, Qwen3_5TextConfig

HERE = Path(__file__).parent
ATTENDING = 2, 5  # layers; the last one must, as LongSpec reads its keys


@dataclass(frozen=True)
class Recipe:
    """What decides what comes out; how the shipped run differed says hybrid/README.md."""

    seed: int = 0
    alone: Stage = Stage(context=512, steps=300)
    whole: tuple = (Stage(context=512, steps=280), Stage(context=2048, steps=20, echo=0.25))
    batch_tokens: int = 4096
    alone_lr: float = 0.02
    new_lr: float = 0.01
    old_lr: float = 0.003
    adam_lr: float = 2e-3
    weight_decay: float = 0.1

    @property
    def stages(self):
        """All stretches of training in order."""
        return self.alone, *self.whole


TOY = Recipe(
    alone=Stage(context=64, steps=2), whole=(Stage(context=64, steps=2),), batch_tokens=128
)


def hybrid_config(tiny):
    """Architecture of the hybrid of a Qwen3 model, with the proportions of Qwen3-Next's states."""
    types = ["linear_attention"] * tiny.num_hidden_layers
    for layer in ATTENDING:
        types[layer] = "full_attention"
    same = "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim"
    same += "num_attention_heads", "num_key_value_heads", "max_position_embeddings", "rms_norm_eps"
    return Qwen3_5TextConfig(
        **{name: getattr(tiny, name) for name in (*same, "bos_token_id", "eos_token_id")},
        layer_types=types,
        tie_word_embeddings=True,
        rope_parameters={**tiny.rope_parameters, "partial_rotary_factor": 1.0},
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=128,
        linear_value_head_dim=64,
    )


@torch.no_grad()
def convert(target):
    """Return the hybrid of `target`: what both have is the target's, gated delta layers are new."""
    model = Qwen3_5ForCausalLM(hybrid_config(target.config))
    weights = target.state_dict()
    for name, weight in model.state_dict().items():
        if "linear_attn" in name:
            continue
        given = weights[name]
        if name.endswith("norm.weight"):
            given = given - 1  # these norms are centred at zero
        elif "q_proj" in name:  # each head's queries, then its gates
            heads = given.unflatten(0, (-1, target.config.head_dim))
            given = torch.cat([heads, torch.zeros_like(heads)], 1).flatten(0, 1)
        elif "o_proj" in name:
            given = 2 * given  # behind gates of a half
        weight.copy_(given)
    for layer in new_layers(model).values():
        layer.A_log.zero_()
        # Half of what a head remembers is gone after 7, 23, 70 and 230 tokens.
        rates = torch.tensor([0.1, 0.03, 0.01, 0.003])
        layer.dt_bias.copy_(rates.expm1().log())
        layer.conv1d.weight[:, 0, -1] += 0.5
    return model


def new_layers(model):
    """Return the gated delta layers by their number."""
    layers = enumerate(model.model.layers)
    return {n: layer.linear_attn for n, layer in layers if hasattr(layer, "linear_attn")}


class Trainer(Resumable):
    """Target, hybrid, optimizers and step count; saved and resumed together."""

    def __init__(self, recipe, documents, state_file):
        torch.manual_seed(recipe.seed)
        self.recipe, self.documents = recipe, documents
        self.target = AutoModelForCausalLM.from_pretrained(HERE, dtype=torch.float32).eval()
        self.target.requires_grad_(False)
        model = convert(self.target)
        for one in (self.target, model):
            one.set_attn_implementation("blocked")
        self.new = new_layers(model)
        super().__init__(model, self._optimizers(model), state_file)

    def _optimizers(self, model):
        new = {id(p) for layer in self.new.values() for p in layer.parameters()}
        groups = {}
        for name, p in model.named_parameters():
            small = p.ndim != 2 or p.shape[0] < 16 or "embed" in name
            groups.setdefault((small, id(p) in new), []).append(p)
        recipe = self.recipe
        muon = [
            {"params": groups[False, True], "peak": recipe.new_lr},
            {"params": groups[False, False], "peak": recipe.old_lr},
        ]
        adam = [
            {"params": groups[True, True], "peak": recipe.adam_lr},
            {"params": groups[True, False], "peak": recipe.adam_lr / 4},
        ]
        return (
            torch.optim.Muon(muon, weight_decay=recipe.weight_decay),
            torch.optim.AdamW(adam, betas=(0.9, 0.95), weight_decay=0.0),
        )

    def run(self, save_every=25):
        """Train to the last step and return the model."""
        first = 0
        for number, stage in enumerate(self.recipe.stages):
            loss = self.loss_alone if number == 0 else self.loss_whole
            rng = torch.Generator().manual_seed(self.recipe.seed + number)
            source = batches(self.documents, stage, self.recipe.batch_tokens, number)
            for index in range(stage.steps):
                rows = echo_passages(next(source), stage, rng)
                if first + index < self.step:  # replayed, as in an unbroken run
                    continue
                self._step(loss, rows, self._rate(number, index))
                if self.step % save_every == 0:
                    self.save()
            first += stage.steps
        self.save()
        return self.model

    def _rate(self, number, index):
        """Factor on the learning rates: a short rise, a plateau, a straight line to zero."""
        recipe, whole = self.recipe, self.recipe.whole
        if number == 0:
            done, steps, peak = index, recipe.alone.steps, recipe.alone_lr / recipe.new_lr
        else:
            done = index + sum(s.steps for s in whole[: number - 1])
            steps, peak = sum(s.steps for s in whole), 1.0
        return peak * min(1.0, (done + 1) / 15, (steps - done) / (0.6 * steps))

    def _step(self, loss_of, rows, factor):
        start = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(rows)
        loss.backward()
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * factor
            optimizer.step()
            optimizer.zero_grad()
        self.losses.append(loss.item())
        elapsed = time.perf_counter() - start
        self.step, self.seconds = self.step + 1, self.seconds + elapsed
        if self.step % 5 == 0:
            recent = sum(self.losses[-5:]) / 5
            speed = rows.shape[0] * (rows.shape[1] - 1) / elapsed
            spent = f"{speed:.0f} tokens/s  {self.seconds / 60:.1f} min"
            print(f"step {self.step}  loss {recent:.3f}  {spent}", flush=True)

    def loss_alone(self, rows):
        """How far the new layers are from attention's share, each given the target's own input."""
        seen, hooks = {}, []
        for number in self.new:
            attention = self.target.model.layers[number].self_attn
            keep = partial(_keep, seen, number)
            hooks.append(attention.register_forward_hook(keep, with_kwargs=True))
        with torch.no_grad():
            self.target.model(rows[:, :-1], use_cache=False)
        for hook in hooks:
            hook.remove()
        total = 0
        for number, layer in self.new.items():
            given, wanted = seen[number]
            apart = (layer(given) - wanted).float().square().mean()
            total += apart / wanted.float().square().mean()
        return total / len(self.new)

    def loss_whole(self, rows):
        """Cross entropy with the text and with the target's distribution, half of each."""
        with torch.no_grad():
            hidden = self.target.model(rows[:, :-1], use_cache=False)[0]
            known = self.target.lm_head(hidden).flatten(0, 1).float().softmax(-1)
        hidden = self.model.model(rows[:, :-1], use_cache=False)[0]
        logits = self.model.lm_head(hidden).flatten(0, 1).float()
        return (F.cross_entropy(logits, rows[:, 1:].flatten()) + F.cross_entropy(logits, known)) / 2


def _keep(seen, number, module, args, given, out):
    """Remember what an attention layer reads and adds."""
    seen[number] = given["hidden_states"], out[0]


def build(recipe, out, files=None):
    """Convert and train; write the checkpoint and its ``evaluation.json``, which is returned."""
    work = out / "work"
    work.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(HERE)
    texts = read_texts(training_files()[:files])
    eos = tokenizer.eos_token_id
    documents = [torch.tensor([eos, *ids]) for ids in tokenizer(texts).input_ids]
    trainer = Trainer(recipe, documents, work / "state.pt")
    write_checkpoint(trainer.run(), tokenizer, out)
    steps = {"tokens_seen": recipe.batch_tokens * sum(one.steps for one in recipe.stages)}
    return evaluate(out, files, trainer, steps)


if __name__ == "__main__":
    command_line(__doc__, build, toy=(TOY, 4), shipped=Recipe())
