"""A real tokenizer that needs no download: byte-level BPE, trained in a second on text that Python ships.

Why a real one? A text has many tokenizations. A model samples one of them; a server that tokenizes the text again gets
the *canonical* one, and the two differ. A toy that maps words to numbers has one id sequence per text and could never
show that. With byte-pair encoding the simulated engine can do what a model does: say `Paris` as `P` + `aris`.

The vocabulary has the added tokens of Qwen3 that matter here. *Special* ones (`<|im_start|>`, `<|im_end|>`,
`<|endoftext|>`) vanish when text is decoded for a user; the others (`<think>`, `<tool_call>`, `<tool_response>` and
their closers) are single ids, too, but stay in the text. Both kinds are recognised wherever they occur in a text.
"""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from tokencache.testing.corpus import corpus
from tokencache.testing.template import CHAT_TEMPLATE, render

if TYPE_CHECKING:
    import random
    from collections.abc import Mapping, Sequence

VOCABULARY = 6000
"""Size of the trained vocabulary, added tokens not counted."""

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Tokens that are left out of decoded text unless asked for."""

MARKUP_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
"""Added tokens that are ordinary text to a reader: the tool and reasoning parsers look for them."""

_WORDS = r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
"""Where merges may not cross: the published pattern of the Qwen tokenizers (and, but for digits, of cl100k)."""


def _byte_alphabet() -> dict[str, int]:
    """Return the byte behind each character of byte-level BPE: itself where it can be printed, else moved up behind 255."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    rest = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(rest)}


_BYTE_OF = _byte_alphabet()


class SimTokenizer:
    """Text to token ids and back, with a chat template; the same for the simulated engine and, once saved, for a real vLLM."""

    def __init__(self, backend: Tokenizer, chat_template: str = CHAT_TEMPLATE) -> None:
        self.backend = backend
        self.chat_template = chat_template
        self._ids: dict[str, int] = backend.get_vocab(with_added_tokens=True)
        self._tokens = {token_id: token for token, token_id in self._ids.items()}
        self._added = frozenset(self._ids[token] for token in SPECIAL_TOKENS + MARKUP_TOKENS)
        self._split_at_added = re.compile("(" + "|".join(map(re.escape, SPECIAL_TOKENS + MARKUP_TOKENS)) + ")")
        self.stop_id = self._ids["<|im_end|>"]
        self.opener_ids = tuple(self.encode("<|im_start|>assistant\n"))

    @property
    def vocabulary_size(self) -> int:
        """Number of ids; valid ids are 0 to this, exclusive."""
        return len(self._ids)

    def encode(self, text: str) -> list[int]:
        """Return the canonical ids of `text`, added tokens recognised wherever they stand, nothing put around it."""
        return [token_id for part in self._split_at_added.split(text) for token_id in self._encoded(part)]

    @functools.lru_cache(maxsize=4096)  # noqa: B019 - one tokenizer per process; the same histories come again and again
    def _encoded(self, part: str) -> tuple[int, ...]:
        return tuple(self.backend.encode(part, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int], skip_special: bool = False) -> str:
        """Text of `ids`; bytes that are no UTF-8 become U+FFFD. `skip_special` leaves the special tokens out."""
        return str(self.backend.decode(list(ids), skip_special_tokens=skip_special))

    def token(self, token_id: int) -> str:
        """Return the vocabulary's own spelling of one id (byte-level alphabet: a space is `Ġ`), as `/tokenize` returns it."""
        return self._tokens[token_id]

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that one id stands for, which alone need not be valid UTF-8."""
        token = self._tokens[token_id]
        if token_id in self._added:
            return token.encode()
        return bytes(_BYTE_OF[character] for character in token)

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
        """Prompt text of a conversation: the chat template run over OpenAI-style messages (arguments as string or object)."""
        return render(self.chat_template, messages, tools, add_generation_prompt=add_generation_prompt, **kwargs)

    def resample(self, text: str, rng: random.Random, rate: float = 0.3) -> list[int]:
        """Ids that decode to `text`, but that `encode` would not choose.

        Each token that can be cut into two pieces of the vocabulary is cut with probability `rate` (0 to 1), at a place
        drawn from `rng`; with a rate above 0 at least one is, if any can be. Added tokens stay whole.
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
        """Every pair of ids that together spell the token; none for an added token."""
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


@functools.lru_cache(maxsize=1)
def build_tokenizer() -> SimTokenizer:
    """Train the tokenizer: about a second at the first call of a process, nothing afterwards; the same ids every time."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ],
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    backend.train_from_iterator(corpus(), trainer)
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS])
    backend.add_tokens([AddedToken(token, normalized=False, special=False) for token in MARKUP_TOKENS])
    return SimTokenizer(backend)
