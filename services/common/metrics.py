"""Metrics of what the services share. Each service defines its own beside its code."""

from prometheus_client import Counter, Gauge, Histogram

STREAM_ENTRIES = Gauge("trivet_stream_entries", "Entries in a stream, read or not", ["stream"])
STREAM_PENDING = Gauge("trivet_stream_pending", "Entries read and not yet acknowledged", ["stream"])
STREAM_OLDEST_SECONDS = Gauge("trivet_stream_oldest_seconds", "Age of the oldest entry of a stream", ["stream"])
STREAM_CLAIMS = Counter("trivet_stream_claims_total", "Entries taken over from a consumer that stopped", ["stream"])
STREAM_REBUILDS = Counter(
    "trivet_stream_rebuilds_total", "Consumer groups made again because Redis had lost them", ["stream"]
)
DEAD_LETTERS = Counter("trivet_dead_letters_total", "Entries given up, by reason", ["stream", "code"])
BLOB_BYTES = Counter("trivet_blob_bytes_total", "Replay bytes moved", ["direction"])
BLOB_FAILURES = Counter("trivet_blob_failures_total", "Replay blobs that could not be used", ["code"])
BLOB_SECONDS = Histogram("trivet_blob_seconds", "Seconds per blob operation", ["operation"])
