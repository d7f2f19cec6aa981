"""Byte-level and character tokenizers in the form of Hugging Face's tokenizer.json. No torch."""

from __future__ import annotations

import json

# How public tokenizers name their end of text.
USUAL_END_TOKENS = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>", "[EOS]", "<|eos|>")


def json_of_merges(ids: bytes, merges: bytes, end_token: str | None) -> bytes:
    """Return the tokenizer.json of a vocab.json and a merges.txt.

    Raises: ValueError.
    """
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Encoder

    vocabulary = json.loads(ids)
    pairs = [
        tuple(line.split()) for line in merges.decode().splitlines() if line[:9] != "#version:"
    ]
    known = [pair for pair in pairs if len(pair) == 2]
    encoder = Encoder(models.BPE(vocab=vocabulary, merges=known))
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoder.decoder = decoders.ByteLevel()
    special = (
        [end_token] if end_token else [name for name in USUAL_END_TOKENS if name in vocabulary]
    )
    encoder.add_special_tokens([AddedToken(name, special=True) for name in special])
    return str(encoder.to_str()).encode()


def json_without_merges(vocabulary: dict[str, int], end_token: str, *, of_bytes: bool) -> bytes:
    """Return the tokenizer.json of single symbols, characters or bytes, followed by an end-of-text token."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Encoder

    encoder = Encoder(models.BPE(vocab={**vocabulary, end_token: len(vocabulary)}, merges=[]))
    encoder.decoder = decoders.Fuse()
    if of_bytes:
        encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        encoder.decoder = decoders.ByteLevel()
    encoder.add_special_tokens([AddedToken(end_token, special=True)])
    return str(encoder.to_str()).encode()


def byte_alphabet() -> list[str]:
    """Return the character that stands for each byte in a byte-level BPE, in the order of the bytes.

    Source: Radford et al. 2019's encoder.py, bytes_to_unicode.
    """
    shown = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in shown else next(others)) for byte in range(256)]
