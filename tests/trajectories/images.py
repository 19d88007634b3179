"""Rollouts with images, as the proxy records them: expanded ids, and the places of the images in each prompt."""

import msgspec

from tests.media import BLUE, RED, described
from tests.trajectories.rollouts import TASK, TOOLS, Talk, result, user
from tokencache.core.media import PlacedMedia
from tokencache.trajectories.rollout import rollout

RED_AT = (5, 4)
"""First token and number of tokens of an image."""


def placed(content=RED, at=RED_AT, media_type="image/png", modality="image"):
    return PlacedMedia(modality, described(content).sha256, media_type, *at)


def seeing(**more):
    """Two turns: an image in the first prompt, another one in the second. A third turn branches off the first."""
    talk = Talk("seeing")
    first = talk.call(TASK, calls=[("c1", "bash", '{"cmd":"wc -l a.py"}')], tools=TOOLS, media=(placed(),), marks=("media",))
    before = talk.turns[0].prompt_tokens + talk.turns[0].completion_tokens
    both = (placed(), placed(BLUE, (before + 3, 6)))
    history = [*talk.history(first), result("c1", "12 a.py with many more words, as long as an image is")]
    second = talk.call(history, "Twelve.", after=first, tools=TOOLS, media=both, marks=("media",), **more)
    talk.call([*talk.history(second), user("Sure?")], "Yes.", after=second, tools=TOOLS, media=both, marks=("media",))
    talk.call(history[:3], "Thirteen.", after=first, tools=TOOLS, match="branch", media=(placed(),), marks=("media",))
    return talk


def of_talk(talk, **changes):
    return msgspec.structs.replace(rollout(talk.records()), **changes)


def sampled_placeholder():
    """The second turn sampled a placeholder. The third one continues it, and a fourth one repeats its reply in an edited context."""
    talk = seeing()
    turns = [turn.id for turn in talk.turns]
    talk.change(turns[1], marks=("media", "sampled-placeholder"))
    edited = [*TASK, user("And?"), talk.reply(turns[1]), user("Sure?")]
    talk.call(edited, "Fourteen.", tools=TOOLS, origin=turns[1], anchors=(turns[1],), match="resplice", reason="context-edited")
    return talk
