"""Lists the reasons why a turn does not simply continue the turn before it.

A turn records one of these as its `reason`. The reason of a `plain` turn explains why the engine rendered the prompt. A `continue` or
`branch` may have a reason too: it explains why replies after the parent were not treated as the model's. To add a reason, add a member to
`Reason`. Tests compare the pages of `docs/` and the viewer with this table.
"""

from enum import StrEnum
from typing import Self


class Described(StrEnum):
    """Names with a meaning in words; a member is written as (name, meaning)."""

    meaning: str

    def __new__(cls, name: str, meaning: str) -> Self:
        """Create a member; its value is its name."""
        member = str.__new__(cls, name)
        member._value_ = name
        member.meaning = meaning
        return member


class Reason(Described):
    """A reason, in the order of `docs/api.md`."""

    # A reply in the history was not recognized (`core.match`).
    UNRECOGNISED_REPLY = "unrecognised-reply", "the history contains a reply that was not recorded here, or none of its replies is certain"
    OTHER_MODEL = "other-model", "the last reply in the history was sampled by another model: for this one it is text"
    REWRITTEN_REPLY = (
        "rewritten-reply",
        (
            "the reply was returned with changes that no rule of this harness allows ([rules](rules.md)), with other reasoning, or with "
            "an id that was issued to another reply"
        ),
    )
    FOREIGN_REPLY = (
        "foreign-reply",
        (
            "the reply has an id or a handle that the proxy issued, but other text; or its context changed and only its text matches a "
            "recorded reply ([evidence](rules.md))"
        ),
    )
    AMBIGUOUS_REPLY = (
        "ambiguous-reply",
        (
            "several recorded turns match, and their tokens differ. If several rollouts share a session, give each its own session, or let "
            "the agent send its token ids back ([NeMo Gym](topologies/nemo-gym.md))"
        ),
    )
    # The harness disconnected during a stream.
    INTERRUPTED = (
        "interrupted",
        "the harness disconnected during a stream and sent back a part of what was sampled; that part keeps its exact ids",
    )
    INTERRUPT_INSIDE_TOKEN = (
        "interrupt-inside-token",
        "the text that the harness received ends inside a token, or nothing shows where its last call ends; it is rendered as text",
    )
    # The harness added text to a reply (`core.added_text`).
    REPLY_EXTENDED = (
        "reply-extended",
        (
            "(`resplice`) the message goes on after the model's end of turn, with words of the harness, or because the request continues "
            "it: the reply keeps its exact ids without its end of turn"
        ),
    )
    ADDED_TEXT_UNPROVEN = (
        "added-text-unproven",
        "a reply was returned with more text than was served, and its ids do not show where that text begins; it is rendered as text",
    )
    # The context was edited: a resplice, or a continuation after all.
    CONTEXT_EDITED = "context-edited", "(`resplice`) messages before or between recognized replies changed"
    RENDERED_ALIKE = (
        "rendered-alike",
        "(`continue`, `branch`) messages changed, but the template renders the history as before: the prompt continues the exact ids",
    )
    PAST_CHANGES = (
        "past-changes",
        "(`resplice`) the template now renders the history differently, so it was rendered again ([templates](templates.md))",
    )
    THINKING_DROPPED = (
        "thinking-dropped",
        (
            "(`resplice`) the session follows the template, which no longer shows the thinking of earlier replies; what it still shows "
            "keeps its exact ids ([thinking](templates.md#thinking-as-the-template-wants-it))"
        ),
    )
    VISIBLE_PART_UNKNOWN = (
        "visible-part-unknown",
        (
            "the session follows the template, and of some or all recognized replies the part that the template still shows does not "
            "begin at a token, or could not be proven; they are rendered as text"
        ),
    )
    NEW_MESSAGES_REACH_BACK = "new-messages-reach-back", "the template puts new messages before the last reply ([templates](templates.md))"
    OTHER_STOP = "other-stop", "(`resplice`) the model stopped at another stop id than the template writes there"
    OPENER_UNKNOWN = (
        "opener-unknown",
        (
            "some or all recognized replies cannot be placed, because the prompt that they were sampled after does not end with a known "
            "generation prompt; they are rendered as text"
        ),
    )
    UNPLACED_REPLIES = (
        "unplaced-replies",
        "an older version recorded the turn, and its record does not say where the replies in its prompt are",
    )
    # Token ids that the client sent back.
    CLIENT_IDS = (
        "client-ids",
        (
            "(`resplice`) the prompt begins with ids that the client sent back on its messages. They are not recorded here and were proven "
            "to be these messages. Only replies recorded from here on are trained; earlier ones are context"
        ),
    )
    CLIENT_IDS_UNPROVEN = (
        "client-ids-unproven",
        "the client returned ids that are not recorded here, and they could not be proven to be these messages",
    )
    # The engine.
    RECORD_ONLY = "record-only", "the engine does not accept token ids"
    RENDERINGS_DIFFER = "renderings-differ", "`/tokenize` renders differently from chat completions"
    ENGINE_UNKNOWN = "engine-unknown", "the engine could not be probed"
    CONTEXT_FULL = "context-full", "the spliced prompt would not fit into the engine's context; the template's own rendering may"
    ENGINE_REFUSED_IDS = (
        "engine-refused-ids",
        "the engine answered 400 to the spliced prompt; nothing was sampled, and the call was sent as the harness wrote it",
    )
    ENGINE_DISAGREES = (
        "engine-disagrees",
        "the engine used other ids than were sent; the turn is recorded with the ids that the engine used",
    )
    TAIL_BY_ENGINE = (
        "tail-by-engine",
        "(`continue`) the engine put the tail after the exact history, and nothing proved it ([drivers](drivers.md))",
    )
    PREFIX_ENDS_BEFORE_LAST_REPLY = (
        "prefix-ends-before-last-reply",
        "the engine accepts only the beginning of a prompt, and an unrecognized reply comes after it",
    )
    NO_RENDERING = "no-rendering", "the context was edited, and this engine offers no rendering"
    NO_LOGPROBS = "no-logprobs", "the engine needs the log probabilities of the last reply with its ids, and they are not recorded"
    NOT_FOR_COMPLETIONS = (
        "not-for-completions",
        "the `completions` driver cannot express what the request asks for; the engine's own chat answered ([drivers](drivers.md))",
    )
    NOT_FOR_GENERATE = (
        "not-for-generate",
        (
            "the request has images, and its exact prompt cannot be sent to `/inference/v1/generate`: a reply or a text contains a "
            "placeholder, or the new images were not found in the prompt ([images](images.md))"
        ),
    )
    EARLIER_THOUGHT = (
        "earlier-thought",
        (
            "the exact prompt has an earlier thought, after which this engine starts a grammar or counts a thinking budget otherwise than "
            "in a direct call ([engines](engines.md#earlier-thoughts))"
        ),
    )
    # The request.
    SWITCHED_OFF = "switched-off", "the request needs a rule that is switched off"
    MEDIA = "media", "the request contains images or other media that the engine cannot use in an exact prompt (`images_why` in `/readyz`)"
    MEDIA_BY_URL = (
        "media-by-url",
        "the request contains an image as a URL: its content is not known, and may change (`--fetch-media` fetches it)",
    )
    UNSUPPORTED_PART = "unsupported-part", "the request contains a content part of a type that vLLM does not know"
    MEDIA_WITH_FOLLOW = "media-with-follow", "the request contains images, and exact prompts with `--history follow` have none"
    CONTINUE_FINAL_MESSAGE = (
        "continue-final-message",
        "the request asks the engine to continue the last message, and that is not exactly a recorded reply",
    )
    NO_GENERATION_PROMPT = "no-generation-prompt", "the request asks for a prompt without a generation prompt"
    ECHO = "echo", "the request asks for the prompt's last message in the reply"
    TRUNCATED_PROMPT = "truncated-prompt", "the request asks the engine to truncate the prompt"
    NO_MESSAGES = "no-messages", "the request has no messages"
    UNREADABLE_HISTORY = "unreadable-history", "the messages are not those of a chat completion request"
    TEXT_COMPLETION = "text-completion", "the request is a text completion, which has no messages"
    # The proxy failed while it planned the call.
    STORE_ERROR = "store-error", "the store failed while the call was planned"
    TORN_RECORD = "torn-record", "the stored records do not fit together"
    INTERNAL_ERROR = "internal-error", "tokencache failed while the call was planned; its log has the traceback"
    # No tail could be proven: `docs/templates.md` explains how tails are proven.
    TAIL_NOT_PROVEN = (
        "tail-not-proven",
        "the tail depends on the text of the reply, or a trusted shape failed its check",
    )
    TEMPLATE_REFUSES = "template-refuses", "the template raises an error for these messages, as it does for a direct call"
    RENDER_ERROR = "render-error", "the engine could not render the conversation"
    STOP_IDS_UNKNOWN = (
        "stop-ids-unknown",
        "the probe found no stop ids, and no reply has shown one, so the end of a reply cannot be located",
    )
    EMPTY_TAIL = "empty-tail", "the template renders nothing after the reply"
    NO_STOP_ID_BEHIND_THE_REPLY = "no-stop-id-behind-the-reply", "no stop id follows the reply in the rendering"
    REPLY_NOT_RENDERED = "reply-not-rendered", "the template does not render the reply"
    SENTINEL_LOST = "sentinel-lost", "the template does not render the sentinel that stands for the reply"
    SENTINEL_TWICE = "sentinel-twice", "the template renders the sentinel that stands for the reply more than once"
    SENTINEL_IN_MESSAGES = "sentinel-in-messages", "the messages contain the random sentinel"


NO_TAIL = frozenset(
    {
        Reason.TAIL_NOT_PROVEN,
        Reason.TEMPLATE_REFUSES,
        Reason.RENDER_ERROR,
        Reason.STOP_IDS_UNKNOWN,
        Reason.EMPTY_TAIL,
        Reason.NO_STOP_ID_BEHIND_THE_REPLY,
        Reason.REPLY_NOT_RENDERED,
        Reason.SENTINEL_LOST,
        Reason.SENTINEL_TWICE,
        Reason.SENTINEL_IN_MESSAGES,
        Reason.NEW_MESSAGES_REACH_BACK,
        Reason.PAST_CHANGES,
    }
)
"""Reasons why no tail could be proven (docs/templates.md)."""
