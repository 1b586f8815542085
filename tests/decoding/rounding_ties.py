"""Texts over caches of 8 bits: the rounding of a key may decide a near-tie, now and then.

Attention's last bit may differ between a pass over one row and one over several. Where it moves a
key across the middle of two steps, passes store it one step apart, and logits differ by as much.
"""

import torch
from specattn.reference import add_gumbel_noise
from transformers import LogitsProcessor, LogitsProcessorList

NEAR = 0.05  # of a logit; 0.011 decided such a text
SHARE = 0.01  # of the runs that may part so, beside one: 4 of 5,863 did


class Recording(LogitsProcessor):
    """Keeps the logits behind every text that it is asked about."""

    context_window = 2**31  # texts without padding

    def __init__(self):
        self.scores = {}

    def __call__(self, input_ids, scores):
        asked = scores.any(-1)  # the rows of other requests are zeros
        texts = map(tuple, input_ids[asked].tolist())
        self.scores |= zip(texts, scores[asked], strict=True)
        return scores


class RoundingTies:
    """Compares texts with plain decoding's, and counts those that rounding parted."""

    def __init__(self):
        self.runs, self.gaps = 0, []

    def check(self, found, expected, plain, *, temperature=0, seed=0):
        """Check that texts are the `expected` ones, or part where plain decoding hardly chose.

        ``plain(logits_processor=...)`` returns the output of plain decoding once more.
        """
        self.runs += 1
        if found == expected:
            return
        recording = Recording()
        output = plain(logits_processor=LogitsProcessorList([recording]))
        assert output.new_tokens == expected
        for row, (theirs, ours) in enumerate(zip(found, expected, strict=True)):
            pairs = list(zip(theirs, ours, strict=True))
            parted = [n for n, (other, own) in enumerate(pairs) if other != own]
            if not parted:
                continue
            before = output.sequences[row][: parted[0] - len(ours)].tolist()
            scores = recording.scores[tuple(before)]
            if temperature:
                place = torch.tensor([row]), torch.tensor([len(before)])
                scores = add_gumbel_noise(scores[None] / temperature, seed, *place)[0]
            other, own = pairs[parted[0]]
            assert own == int(scores.argmax())
            gap = float(scores[own] - scores[other])
            assert gap <= NEAR, f"row {row}: {other} for {own} at {parted[0]}, {gap:.3f} apart"
            self.gaps.append(gap)

    def check_share(self):
        """Check that few runs parted."""
        assert len(self.gaps) <= 1 + SHARE * self.runs, f"{len(self.gaps)} of {self.runs}"
