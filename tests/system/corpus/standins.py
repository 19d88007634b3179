"""Stand-ins: replaces a text by a meaningless one of the same shape.

What the makers of a harness wrote (system prompts, descriptions of tools, reminders) is theirs. For a test of a proxy only its shape
matters: how long it is, where its lines end, and which of two texts are equal, or begin alike. So each word is replaced by another of the
same length and case, each digit by another digit, and everything else stays. The replacement of a word depends only on the line up to it,
so

* a line is always replaced by the same line, wherever it occurs;
* lines that begin alike have stand-ins that begin alike;
* texts that differ anywhere have stand-ins that differ.

The choice is among a few words and depends on a key that is not kept, the digest of the whole recording: the original cannot be recovered
from it.
"""

import hashlib
import re
from collections.abc import Iterable, Sequence

WORDS = {
    1: "abcdefgh",
    2: ("as", "by", "do", "go", "in", "on", "so", "up"),
    3: ("oak", "row", "sea", "tin", "map", "ivy", "cup", "fog"),
    4: ("leaf", "moss", "clay", "barn", "wool", "rain", "path", "seed"),
    5: ("river", "stone", "plain", "cloud", "field", "grass", "lemon", "shore"),
    6: ("garden", "meadow", "timber", "cotton", "barley", "harbor", "ginger", "walnut"),
    7: ("orchard", "pebbles", "lantern", "granite", "weather", "blossom", "furrows", "chimney"),
    8: ("mountain", "woodland", "farmyard", "sunlight", "hillside", "driftway", "cornmeal", "seashell"),
}
LONGEST = max(WORDS)
TOKENS = r"(?P<word>[A-Za-z]+)|(?P<quad>\d+(?:\.\d+){3,})|(?P<digits>\d+)|(?P<other>.)"
MARKUP = r"</?[a-z][\w-]{0,30}>|x-anthropic-billing-header:"
"""Words that structure a prompt and that programs search for."""


def word_like(word: str, choice: int) -> str:
    """A word of the same length and case."""
    made = ""
    while len(made) < len(word):
        choice, place = divmod(choice, 8)
        made += WORDS[min(len(word) - len(made), LONGEST)][place]
    return "".join(new.upper() if old.isupper() else new for old, new in zip(word, made, strict=True))


class StandIns:
    """Makes stand-ins with one key; `kept` are texts that stay wherever they occur, `patterns` are regular expressions of such texts."""

    def __init__(self, key: bytes, kept: Iterable[str] = (), patterns: Sequence[str] = ()) -> None:
        self._key = key
        texts = sorted({re.escape(text) for text in kept if text}, key=len, reverse=True)
        self._tokens = re.compile(f"(?P<kept>{'|'.join([*texts, *patterns, MARKUP])})|{TOKENS}", re.DOTALL)
        self._made: dict[tuple[str, frozenset[str]], str] = {}
        self._taken: dict[str, str] = {}
        self.originals: set[str] = set()
        """Everything that was replaced: the runs of text between what stayed."""

    def text(self, text: str, known: frozenset[str] = frozenset()) -> str:
        """The stand-in of a text, in which words that are `known` (in lower case) stay."""
        if (text, known) not in self._made:
            made, attempt = self._stand_in(text, known), 0
            while self._taken.setdefault(made, text) != text:  # equal by chance: then its last word is changed
                attempt += 1
                made = self._stand_in(text, known, attempt)
            self._made[text, known] = made
        return self._made[text, known]

    def opaque(self, text: str, attempt: int = 0) -> str:
        """The stand-in of text without words, an identity: letters and digits become others."""
        state = hashlib.blake2b(f"{attempt}{text}".encode("utf-8", "surrogatepass"), key=self._key).digest()
        return "".join(_turned(character, state[at % len(state)]) for at, character in enumerate(text))

    def _stand_in(self, text: str, known: frozenset[str], attempt: int = 0) -> str:
        made, run, state, last = [], "", self._key, None
        for token in self._tokens.finditer(text):
            word = token[0]
            state = hashlib.blake2b(state + word.encode("utf-8", "surrogatepass"), digest_size=16).digest()
            if token["kept"]:
                self.originals.add(run)
                run = ""
                made.append(word)
                continue
            run += word
            stays = token["word"] and word.lower() in known
            made.append(word if stays else _replaced(token, int.from_bytes(state)))
            if made[-1] != word:
                last = len(made) - 1
            if word == "\n":
                state = self._key
        self.originals.add(run)
        if attempt and last is not None:
            made[last] = self.opaque(made[last], attempt)
        return "".join(made)


def _replaced(token: re.Match[str], choice: int) -> str:
    text = token[0]
    if token["word"]:
        return word_like(text, choice)
    if token["quad"]:  # four numbers would be an address
        return re.sub(r"\d", "0", text)
    if token["digits"]:
        return "".join(str(choice // 10**at % 10) for at in range(len(text)))
    return "#" if text == "@" else text


def _turned(character: str, by: int) -> str:
    if character.isdigit():
        return str(by % 10)
    if character in "abcdef":
        return "abcdef"[by % 6]
    if character.isascii() and character.isalpha():
        made = "ghijklmnopqrstuvwxyz"[by % 20]
        return made.upper() if character.isupper() else made
    return character
