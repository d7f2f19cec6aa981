"""Make a tokenizer of texts: train a byte-level BPE, or take their characters. No torch."""

from collections.abc import Iterable

from gpt2lab.errors import DataError, first_line, is_out_of_memory
from gpt2lab.tokenizers.huggingface import of_json
from gpt2lab.tokenizers.interface import END_TOKEN, Tokenizer
from gpt2lab.tokenizers.plain import CharactersTokenizer

SMALLEST = 257  # every byte and <|endoftext|>


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Return a byte-level BPE of `vocab_size` ids: <|endoftext|> is 0, the bytes follow, then the merges.

    Texts are split into words as GPT-2 splits them. The same texts, in any order and with any number of threads, give
    the same tokenizer: merges of equal counts are ordered by their ids.

    Raises: DataError if the texts do not have enough different words.
    """
    from tokenizers import Tokenizer as Encoder
    from tokenizers import decoders, models, pre_tokenizers, trainers

    if vocab_size < SMALLEST:
        raise DataError(
            f"vocab_size {vocab_size} must be at least {SMALLEST}: the bytes, and {END_TOKEN}"
        )
    encoder = Encoder(models.BPE())
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoder.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_TOKEN],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    try:
        encoder.train_from_iterator(texts, trainer)
    except BaseException as error:  # a thread that cannot start makes the library panic
        if is_out_of_memory(error):
            raise MemoryError(first_line(error)) from error
        raise
    found = of_json(str(encoder.to_str()).encode(), END_TOKEN, "the trained tokenizer")
    if found.size != vocab_size:
        raise DataError(
            f"the text yields only {found.size:,} ids, not {vocab_size:,}; lower --vocab_size, or give more text"
        )
    return found


def characters_of(texts: Iterable[str]) -> CharactersTokenizer:
    """Return the tokenizer of all characters of some texts, in the order of their code points.

    Raises: DataError if there are none.
    """
    found: set[str] = set()
    for text in texts:
        found.update(text)
    if not found:
        raise DataError("no characters: the texts are empty")
    return CharactersTokenizer(sorted(found))
