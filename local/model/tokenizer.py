"""The word-level tokenizer of the small model: every word of its vocabulary is one token.

Words are separated by white space, and decoding joins them with single spaces. A word outside the
vocabulary becomes `<unk>`, so a task of the user's own never fails for what its files print.
"""

from string import ascii_lowercase

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

PAD = "<pad>"
UNKNOWN = "<unk>"
END = "<end>"  # closes the model's turn: the end-of-sequence token
OBSERVATION = "<obs>"  # opens the environment's answer
ACTION = "<act>"  # hands the turn to the model

SPECIAL_WORDS = (PAD, UNKNOWN, END, OBSERVATION, ACTION)
CHAIN_WORDS = ("start", "cat", "fix", "submit", "ok", "bad", "next", "end", "error", "done")
FILE_WORDS = tuple(f"f{i}" for i in range(16))
# Words for a user's own tasks. As a command none of them ends the shell, waits for input or opens a block.
_SHELL_WORDS = """
    ls pwd echo test find mkdir touch cp mv diff true false
    file directory line no such not found exists empty yes failed passed pass fail run build make print write
    open close list new old name value key size count sum total left right up down to from is and or
    zero one two three four five six seven eight
"""
SHELL_WORDS = tuple(_SHELL_WORDS.split())
NAME_WORDS = tuple("0123456789") + tuple(ascii_lowercase)


def _vocabulary() -> tuple[str, ...]:
    words = SPECIAL_WORDS + CHAIN_WORDS + FILE_WORDS + SHELL_WORDS + NAME_WORDS
    if len(set(words)) != len(words):
        raise AssertionError("the vocabulary names a word twice")
    return words


VOCABULARY = _vocabulary()
TOKEN_ID = {word: token_id for token_id, word in enumerate(VOCABULARY)}


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer; `save_pretrained` writes it in the layout that `AutoTokenizer` reads."""
    words = Tokenizer(WordLevel(dict(TOKEN_ID), unk_token=UNKNOWN))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token=PAD,
        unk_token=UNKNOWN,
        eos_token=END,
        additional_special_tokens=[OBSERVATION, ACTION],
        clean_up_tokenization_spaces=False,
    )
