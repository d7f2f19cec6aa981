"""Try a tokenizer of unknown origin in this process, whose time and memory are limited: it may hang or end it.

python -m gpt2lab.tokenizers.trial SECONDS WHERE [END_TOKEN] < tokenizer.json

On stdin may also be a vocab.json and a merges.txt with a zero byte between them. The library panics, aborts, or does
not end for some files. A line on stdout says what is wrong.
"""

import resource
import sys

from gpt2lab.errors import DataError, first_line
from gpt2lab.tokenizers.huggingface import HuggingFaceTokenizer, of_json
from gpt2lab.tokenizers.interface import json_of_merges

_MEMORY = 4 * 2**30  # bytes of address space
_LINES = (
    "The quick brown fox jumps over the lazy dog, it's 12345.678 of them; don't we'll.\n",
    "def f(x: int) -> str:\n\treturn {'a': [x, -1], \"b\": x != 0}  # comment\n\n\n",
    "na\u00efve caf\u0065\u0301 \u4f60\u597d \u3053\u3093 \u0645\u0631\u062d\u0628\u0627 \U0001f642 \x00\u2028\ufeff\n",
    *(character * 2000 + "!\n" for character in "a 0.-\u00e9"),
    "ab" * 1000 + "\n",
)


def main() -> int:
    """Open the tokenizer on stdin, and encode, decode and measure a page of text; return the exit code."""
    seconds, where, *end = sys.argv[1:]
    limits = {
        resource.RLIMIT_AS: _MEMORY,
        resource.RLIMIT_CPU: int(seconds),
        resource.RLIMIT_CORE: 0,
    }
    for kind, most in limits.items():
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(
            kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard)
        )
    try:
        end_token = end[0] if end else None
        content, is_older_form, merges = sys.stdin.buffer.read().partition(b"\0")
        if is_older_form:
            content = json_of_merges(content, merges, end_token)
        found = of_json(content, end_token, where)
        if isinstance(found, HuggingFaceTokenizer):
            ids = found.encode("".join(_LINES))
            found.encode_documents(_LINES)
            found.decode(ids)
            found.byte_lengths()
    except DataError as error:
        print(error)
        return 1
    except BaseException as error:  # a panic of the library is no Exception
        print(f"{where}: not a tokenizer that can be used ({first_line(error)})")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
