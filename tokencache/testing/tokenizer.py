"""A real tokenizer that needs no download: byte-level BPE, trained in a second on text that Python ships.

A text has many tokenizations. A model samples one of them; a server that tokenizes the text again gets the *canonical* one, and the two
may differ. A toy tokenizer that maps words to numbers cannot show that. With byte-pair encoding the simulated engine can write `Paris` as
`P` + `aris`, as a model does.

The vocabulary has the added tokens of Qwen3 that matter here. *Special* ones (`<|im_start|>`, `<|im_end|>`, `<|endoftext|>`) disappear
when text is decoded for a user. The others (`<think>`, `<tool_call>`, `<tool_response>` and their closers) are also single ids, but stay
in the text. Both kinds are recognised anywhere in a text.

The training text must contain whole English words, Python and JSON; otherwise words would split into letters. It is the source code of
Python's standard library with its docstrings, and some lines of conversation as agents write them. It is the same in every run with one
Python version. Another version gives different ids, so do not store them.
"""

import functools
import importlib.util
import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from tokencache.testing.template import CHAT_TEMPLATE, render

_MODULES = (
    "argparse", "inspect", "json.decoder", "typing", "datetime", "subprocess", "tarfile", "difflib", "logging", "http.client",
    "doctest", "pathlib", "optparse", "unittest.mock", "pydoc", "threading", "zipfile", "shutil", "statistics", "email.message",
)  # fmt: skip
"""Standard library modules whose source code is read, about a megabyte: written in Python, with long docstrings."""

_SENTENCES = (
    "I should list the files first, then read the one that fails.",
    "Let me look at the test output. The function returns the wrong value when the list is empty.",
    "The user wants me to fix the bug. I need to find where the session is opened and closed.",
    "All done. I changed two files and the tests pass now. Is there anything else you would like me to do?",
    "The assistant answers the user. The system prompt tells the assistant which tools it has.",
    "Now I will write the new version, run the command again and check what it prints.",
)
_TOOL_CALLS = (
    {"name": "bash", "arguments": {"command": "ls -la src && cat README.md", "timeout": 5000}},
    {"name": "read_file", "arguments": {"path": "/workspace/src/main.py", "offset": 1, "limit": 200}},
    {"name": "edit_file", "arguments": {"file_path": "tests/test_main.py", "old_string": "assert x == 1", "new_string": "assert x == 2"}},
    {"name": "search", "arguments": {"query": "weather in Paris", "max_results": 10, "recursive": True}},
)

VOCABULARY = 6000
"""Size of the trained vocabulary, added tokens not counted."""

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Tokens that are omitted from decoded text by default."""

MARKUP_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
"""Added tokens that are ordinary text to a reader: the tool and reasoning parsers look for them."""

_WORDS = r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
"""Merges do not cross these boundaries: the published pattern of the Qwen tokenizers (and, except for digits, of cl100k)."""


def _byte_alphabet() -> dict[str, int]:
    """Map the characters of byte-level BPE to bytes: a printable byte is its own character, others start at 256."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    rest = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(rest)}


_BYTE_OF = _byte_alphabet()
_CHARACTER_OF = {byte: character for character, byte in _BYTE_OF.items()}


class SimTokenizer:
    """Converts text to token ids and back, and renders a chat template. Saved to a folder, a real vLLM can load it."""

    def __init__(self, backend: Tokenizer, chat_template: str = CHAT_TEMPLATE) -> None:
        self.backend = backend
        self.chat_template = chat_template
        self._ids: dict[str, int] = backend.get_vocab(with_added_tokens=True)
        self._tokens = {token_id: token for token, token_id in self._ids.items()}
        added = backend.get_added_tokens_decoder()
        self._added = frozenset(added)
        self._split_at_added = re.compile("(" + "|".join(re.escape(token.content) for token in added.values()) + ")")
        self._special = frozenset(self._ids[token] for token in SPECIAL_TOKENS)
        self.stop_id = self._ids["<|im_end|>"]
        self.opener_ids = tuple(self.encode("<|im_start|>assistant\n"))

    @property
    def vocabulary_size(self) -> int:
        """Number of ids; valid ids are 0 to this, exclusive."""
        return len(self._ids)

    def encode(self, text: str) -> list[int]:
        """Return the canonical ids of `text`. Added tokens are recognized anywhere; no tokens are put before or after it."""
        return [token_id for part in self._split_at_added.split(text) for token_id in self._encoded(part)]

    @functools.lru_cache(maxsize=4096)  # noqa: B019 - one tokenizer per process; the same histories are encoded many times
    def _encoded(self, part: str) -> tuple[int, ...]:
        return tuple(self.backend.encode(part, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int], skip_special: bool = False) -> str:
        """Return the text of `ids`. Bytes that are not UTF-8 become U+FFFD. `skip_special` omits special tokens."""
        return str(self.backend.decode(list(ids), skip_special_tokens=skip_special))

    def token(self, token_id: int) -> str:
        """Return the vocabulary's spelling of one id (byte-level alphabet: a space is `Ġ`), as `/tokenize` returns it."""
        return self._tokens[token_id]

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one id. Alone they may be invalid UTF-8."""
        token = self._tokens[token_id]
        if token_id in self._added:
            return token.encode()
        return bytes(_BYTE_OF[character] for character in token)

    def is_special(self, token_id: int) -> bool:
        """Whether an id is omitted from decoded text by default."""
        return token_id in self._special

    def spell(self, data: bytes) -> list[int]:
        """Return one id for each byte. Bytes of an incomplete character have no other ids."""
        return [self._ids[_CHARACTER_OF[byte]] for byte in data]

    def id_of(self, token: str) -> int:
        """Return the id of a token in the vocabulary's spelling; KeyError if there is none."""
        return self._ids[token]

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """Return the prompt text of a conversation: OpenAI messages (arguments as string or object) through the chat template."""
        return render(self.chat_template, messages, tools, add_generation_prompt=add_generation_prompt, **kwargs)

    def resample(self, text: str, rng: random.Random, rate: float = 0.3) -> list[int]:
        """Return ids that decode to `text` and differ from those of `encode`.

        Each token that can be split into two tokens of the vocabulary is split with probability `rate` (0 to 1), at a random position.
        With a rate above 0 at least one is split, if possible. Added tokens stay whole.
        """
        pairs = [(token_id, self._cuts(token_id)) for token_id in self.encode(text)]
        chosen = {i for i, (_, cuts) in enumerate(pairs) if cuts and rng.random() < rate}
        if not chosen and rate > 0:
            chosen = {i for i in [rng.choice([i for i, (_, cuts) in enumerate(pairs) if cuts] or [-1])] if i >= 0}
        ids: list[int] = []
        for i, (token_id, cuts) in enumerate(pairs):
            ids.extend(rng.choice(cuts) if i in chosen else (token_id,))
        return ids

    @functools.cache  # noqa: B019 - one tokenizer per process
    def _cuts(self, token_id: int) -> tuple[tuple[int, int], ...]:
        """Return all pairs of ids that together spell the token; none for an added token."""
        if token_id in self._added:
            return ()
        token = self._tokens[token_id]
        pieces = ((token[:i], token[i:]) for i in range(1, len(token)))
        return tuple((self._ids[left], self._ids[right]) for left, right in pieces if left in self._ids and right in self._ids)

    def save(self, directory: str | Path) -> None:
        """Write a Hugging Face tokenizer folder (`tokenizer.json`, `tokenizer_config.json`) that transformers and vLLM load."""
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        self.backend.save(str(folder / "tokenizer.json"))
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "model_max_length": 131072,
            "clean_up_tokenization_spaces": False,
            "chat_template": self.chat_template,
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def training_text() -> Iterator[str]:
    """Yield the training text of the tokenizer in pieces, always in the same order."""
    for name in _MODULES:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None and spec.origin.endswith(".py"):
            yield Path(spec.origin).read_text(encoding="utf-8")
    for _ in range(40):
        yield from (f"{line}\n\n" for line in _SENTENCES)
        yield from (f"\n{json.dumps(call)}\n" for call in _TOOL_CALLS)


@functools.lru_cache(maxsize=1)
def build_tokenizer() -> SimTokenizer:
    """Train the tokenizer. The first call of a process takes about a second, later calls nothing. The ids are always the same."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ],
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    backend.train_from_iterator(training_text(), trainer)
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS])
    backend.add_tokens([AddedToken(token, normalized=False, special=False) for token in MARKUP_TOKENS])
    return SimTokenizer(backend)
