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
# What was done to samples that are used all the same.
NOTES = ("truncated_captions", "truncated_images")


class BadSample(Exception):
    """A sample that cannot be used.

    Attributes:
        cause: to count by; of a sample in a shard one of CAUSES.
    """

    def __init__(self, cause: str, detail: str) -> None:
        super().__init__(f"{cause}: {detail}")
        self.cause = cause
