"""A byte-level BPE tokenizer of the training text."""

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"

# Words take the space or underscore before them, digits stand alone, and a line break goes with
# the indentation that follows it: the indent of a line is one token.
PIECES = r"[ _]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\n+ *|[^\S\n]+(?=\S)|\s+"


def train_tokenizer(texts, vocab_size):
    """Learn the merges.

    Parameters
    ----------
    texts : list of str
    vocab_size : int

    Returns
    -------
    PreTrainedTokenizerFast
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )
