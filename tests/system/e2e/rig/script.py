"""The scripted turns of episodes, and their random tokenization; used inside vLLM's engine process and in a worker of Dynamo."""

import re

MARKER = re.compile(r"EPISODE:([A-Za-z0-9_-]+)")
SEEN = re.compile(r"\{\{seen:(.+?)\}\}")
OPENER = "<|im_start|>assistant"
TOOLS = "<tools>"
CUT = "\u241f"
DRIFT = 0.3


def byte_letters():
    """The letter that a byte-level vocabulary writes for each byte (GPT-2's `bytes_to_unicode`)."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (byte for byte in range(256) if byte not in visible)
    return {byte: chr(byte) for byte in visible} | {byte: chr(256 + n) for n, byte in enumerate(others)}


class Drifter:
    """Tokenizes text as a model might have sampled it."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.ids = tokenizer.get_vocab(with_added_tokens=True)
        self.added = set(tokenizer.get_added_tokens_decoder())
        self.letters = byte_letters()
        self.bytes = {letter: byte for byte, letter in self.letters.items()}

    def bytes_of(self, ids):
        """The bytes that some ids stand for; they may end within a character."""
        tokens = [(token_id, self.tokenizer.id_to_token(token_id)) for token_id in ids]
        return b"".join(
            token.encode() if token_id in self.added else bytes(self.bytes[letter] for letter in token) for token_id, token in tokens
        )

    def encode_rest(self, rest, rng):
        """Ids for the rest of a text (bytes), which may begin within a character."""
        first = next((at for at, byte in enumerate(rest) if byte & 0xC0 != 0x80), len(rest))
        within = [self.ids[self.letters[byte]] for byte in rest[:first]]
        text = rest[first:].decode()
        return within + (self.encode(text, rng) if text else [])

    def cuts(self, token_id):
        """Every pair of ids that together decode to this token."""
        if token_id in self.added:
            return []
        token = self.tokenizer.id_to_token(token_id)
        halves = ((token[:i], token[i:]) for i in range(1, len(token)))
        return [(self.ids[left], self.ids[right]) for left, right in halves if left in self.ids and right in self.ids]

    def encode(self, text, rng):
        """Ids that decode to `text` without its marks, with at least one token split if one can be split."""
        if CUT in text:
            return [token_id for piece in text.split(CUT) for token_id in self.encode(piece, rng)]
        canonical = self.tokenizer.encode(text, add_special_tokens=False).ids
        if len(canonical) == 1:
            return canonical
        cuts = {at: pairs for at, token_id in enumerate(canonical) if (pairs := self.cuts(token_id))}
        chosen = {at for at in cuts if rng.random() < DRIFT}
        if cuts and not chosen:
            chosen = {rng.choice(sorted(cuts))}
        ids = []
        for at, token_id in enumerate(canonical):
            ids.extend(rng.choice(cuts[at]) if at in chosen else (token_id,))
        return ids


def scripted_text(episodes, prompt):
    """The text of this turn in the episode that the prompt names; None if it names none."""
    named = MARKER.search(prompt)
    if named is None:
        return None
    episode = episodes.get(named.group(1))
    if episode is None:
        return f"There is no episode {named.group(1)}."
    if isinstance(episode, dict):
        if "side" in episode and TOOLS not in prompt:
            return episode["side"]
        behind = prompt.rsplit(OPENER, 2)[-2]
        for words, turn in episode.get("asked", {}).items():
            if words in behind:
                return turn
        episode = episode["turns"]
    turn = episode[min(prompt.count(OPENER), len(episode)) - 1]
    return SEEN.sub(lambda wanted: (re.findall(wanted.group(1), prompt) or ["nothing seen"])[-1], turn)
