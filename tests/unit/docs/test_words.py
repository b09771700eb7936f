"""One word for one thing, and it is the field's: words that another one has replaced do not come back."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FOLDERS = ("services", "proto", "configs", "deploy", "docs", "examples", "benchmarks")
SUFFIXES = {".py", ".proto", ".md", ".yaml", ".yml", ".tpl", ".sh", ".txt"}
# By pattern, the word to use instead.
REPLACED = {
    r"\bconductor\b": "orchestrator",
    r"\bpresence\b(?! and frequency)": "registration",
    r"\bparcels?\b": "chunk",
    r"\bcuts?\b(?!( |-)(it )?(off|short|to)\b)": "shard, split or truncate",
    r"\b(held|holds?|holding) to\b": "compare with",
    r"\bbesides?\b": "in addition, or apart from",
    r"\b(go|goes|going|went) on\b": "resume, or continue",
    r"\bgone\b": "missing",
    r"\bwhole or not at all\b": "atomically",
    r"\b(told|tells? (the|people|everyone))\b": "report",
    r"\b[Oo]ff[-_]policy[-_ ]mask\b": "sequence mask",
    r"(?<![Kk]eep )\bsampling mask": "candidate set",
    r"\bratio_clip\b": "clip_ratio",
    r"\bsampler_logprobs\b": "rollout_logprobs",
    r"\b(the|each|one|next|same) issue\b|\bissues? (of a|is|are)\b|\bprompt\.issue\b": "request",
    r"\btrivet replay\b|\bservices[./]trainer[./]replay\b": "rerun",
    r"\brecording_lost\b": "capture_lost",
    r"\bmasked_sequence_ratio\b": "masked_fraction",
    r"\btruncated_ratio\b": "truncated_fraction",
    r"\bcandidates_mean\b": "candidate_set_size",
    r"\btrivet audit --config\b": "trivet audit FILE",
    r"\bValuePair\b|--value\b": "step metric",
    r"\bfor want of\b|\bfor any way\b|\bstands? with its\b|\benters itself\b": "plain English",
}
# Elsewhere a judge is a scorer's model.
REPLACED_IN_TRAINER = {r"\bjudges?\b": "critic", r"\b[Ll]ead\b(?! to)": "rank 0"}
ALLOWED = {
    # What steps.jsonl and records of earlier versions hold.
    ("services/common/run_files/run_log.py", r"\bmasked_sequence_ratio\b"),
    ("services/common/run_files/run_log.py", r"\btruncated_ratio\b"),
    ("services/common/run_files/run_log.py", r"\bcandidates_mean\b"),
}


def texts() -> dict[str, str]:
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES]
    # The changelog has the old words on purpose: in its tables of what is called otherwise now.
    paths += [path for path in ROOT.glob("*.md") if path.name != "CHANGELOG.md"]
    return {
        path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
        for path in paths
        if "_pb2" not in path.name and "node_modules" not in path.parts
    }


TEXTS = texts()


@pytest.mark.parametrize(("pattern", "word"), [*REPLACED.items(), *REPLACED_IN_TRAINER.items()])
def test_a_replaced_word_does_not_come_back(pattern, word):
    folder = "services/trainer/" if pattern in REPLACED_IN_TRAINER else ""
    found = [
        f"{name}:{text.count(chr(10), 0, match.start()) + 1}: {match[0]!r}, expected {word}"
        for name, text in TEXTS.items()
        if name.startswith(folder) and (name, pattern) not in ALLOWED
        for match in re.finditer(pattern, text)
    ]
    assert found == []


def test_the_texts_are_those_of_the_whole_tree():
    assert {"README.md", "services/trainer/loop.py", "docs/metrics.md", "proto/trivet/v1/sample.proto"} <= TEXTS.keys()
    assert len(TEXTS) > 250
