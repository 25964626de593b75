"""Why a sample cannot be used."""

from __future__ import annotations

# Each is counted by itself, in the metrics as skipped_CAUSE.
CAUSES = (
    "unreadable_shard",
    "missing_image",
    "empty_image",
    "not_an_image",
    "truncated_image",
    "broken_image",
    "oversized_image",
    "extreme_aspect",
    "missing_caption",
    "empty_caption",
    "broken_caption",
    "long_caption",
    "broken_json",
    "missing_id",
    "failed",
)
# Of a shard, and not of a sample: some of it is never read, for it is cut off or damaged, or its index file is wrong.
INCOMPLETE_SHARD = "incomplete_shard"
# What was done to samples that are used all the same; and how many shards are incomplete.
NOTES = ("truncated_captions", "truncated_images", "incomplete_shards")


class BadSample(Exception):
    """A sample that cannot be used.

    Attributes:
        cause: to count by; of a sample in a shard one of CAUSES.
    """

    def __init__(self, cause: str, detail: str) -> None:
        super().__init__(f"{cause}: {detail}")
        self.cause = cause
