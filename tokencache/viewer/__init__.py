"""The viewer: a page at `/tokencache/ui/` on which a person sees what a trainer takes home, and why a rollout split.

`routes`  serves the page
`static`  the page itself: HTML, one style sheet, JavaScript modules; written by hand, nothing is built, nothing comes from elsewhere

The page holds no data. What it shows comes from the trainer's routes (`tokencache.trainer`), behind the trainer's key. Whatever a
model, a harness or a user wrote is hostile: it becomes text nodes, never markup, and the page's policy runs no script but its own.
"""
