"""GIT: one image before the prompt, whose positions begin after it; a caption needs no prompt."""

from __future__ import annotations

from beheld.families.family import IMAGE, Family, KnownCheckpoint

FAMILY = Family(
    model_types=("git",),
    tested=(
        KnownCheckpoint(
            "git",
            "GitForCausalLM",
            "microsoft/git-base-coco",
            IMAGE,
            "one image, before the prompt, whose positions begin after it",
            one_image=True,
            by_census=True,
        ),
    ),
    placeholder_tokens={"image": "[PAD]"},
    both_ways="media",
)
