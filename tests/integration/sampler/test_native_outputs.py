"""vLLM's native capture needs a GPU to run; here its real output classes are read."""

import numpy as np
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput, SamplingMask, WeightVersionSpan

from services.rollout.vllm_engine.outputs import native_replay, sample_from
from services.rollout.vllm_engine.reported import Reported


class Tokenizer:
    def decode(self, token_ids, skip_special_tokens):
        assert skip_special_tokens
        return "".join(chr(97 + token) for token in token_ids)


def test_vllm_output_classes_become_a_sample():
    flat = FlatLogprobs()
    for token, value, other in ((3, -0.25, 8), (1, -1.5, 9)):
        flat.append_fast([token, other], [value, -2.0], iter([1, 2]), [None, None])
    output = CompletionOutput(
        index=0,
        text="",
        token_ids=[3, 1],
        cumulative_logprob=None,
        logprobs=flat,
        routed_experts=np.arange(4 * 3 * 2, dtype=np.uint8).reshape(4, 3, 2),
        finish_reason="stop",
        sampling_mask=SamplingMask([[3, 8], [1, 9, 4]]),
        weight_versions=[WeightVersionSpan("1:aa", 0, 1), WeightVersionSpan("2:bb", 1, 2)],
    )
    replay = native_replay(output, [1, 2], candidates=True)
    sample = sample_from(output, replay, Tokenizer(), Reported("processed_logprobs", 1.0))
    assert sample.token_ids.tolist() == [3, 1]
    assert sample.logprobs.tolist() == [-0.25, -1.5]
    assert sample.logprobs.dtype == np.float32
    assert sample.text == "db"
    assert [(span.version, span.start, span.end) for span in sample.spans] == [(1, 0, 1), (2, 1, 2)]
    np.testing.assert_array_equal(sample.replay.routing, output.routed_experts[:, 1:])
    assert sample.replay.candidates.counts.tolist() == [2, 3]
