"""Metrics that the services share. Each service defines its own in its code; docs/metrics.md lists all."""

from prometheus_client import Counter, Histogram

STREAM_CLAIMS = Counter("trivet_stream_claims_total", "Entries taken over from a consumer that stopped", ["stream"])
STREAM_REBUILDS = Counter(
    "trivet_stream_rebuilds_total", "Consumer groups made again because Redis had lost them", ["stream"]
)
OUTAGES = Counter("trivet_outages_total", "Outages that the service waited for, by what could not serve", ["code"])
VERSIONS_ANNOUNCED_AGAIN = Counter(
    "trivet_versions_announced_again_total", "Policy versions announced again because Redis had lost them"
)
DEAD_LETTERS = Counter("trivet_dead_letters_total", "Entries given up, by reason", ["stream", "code"])
BLOB_BYTES = Counter("trivet_blob_bytes_total", "Bytes of replay blobs moved", ["operation"])
BLOB_FAILURES = Counter("trivet_blob_failures_total", "Replay blobs that could not be used", ["code"])
BLOB_SECONDS = Histogram(
    "trivet_blob_seconds",
    "Seconds to put or get one replay blob",
    ["operation"],
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10),
)
