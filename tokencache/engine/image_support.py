"""How an engine accepts exact prompts with images. `engine.images` finds it out, and the drivers use it."""

from typing import Literal, NamedTuple

ImageRoute = Literal["", "plugin", "generate"]


class ImageSupport(NamedTuple):
    """How an engine accepts exact prompts with images.

    Attributes:
        route: `plugin` (`tokencache_vllm`), `generate` (`/inference/v1/generate`), or `""` if it does not.
        why: why it does not, or why not with the plugin; `""` if the plugin is used.
        placeholder_ids: the ids in whose place it puts embeddings; for `generate`, all ids of expansions (`core.expansion`).
        placeholder: the ids that the template writes for an image, for `generate`.
    """

    route: ImageRoute = ""
    why: str = "not asked"
    placeholder_ids: tuple[int, ...] = ()
    placeholder: tuple[int, ...] = ()
