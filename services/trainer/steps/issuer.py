import re
import uuid

from trivet.v1 import sample_pb2

from services.common.config import Config
from services.common.run_files.lineage import code_version, config_version
from services.trainer.data.prompts import PromptData, PromptRow

# As group_id writes it, and no longer than a request (uint64) can be.
_GROUP_ID = re.compile(r"([0-9a-f]{8})-(0|[1-9][0-9]{0,19})")


class Issuer:
    """Turns data rows into prompts: the same request always gives the same prompt.

    Group ids begin with the history's own id, so that what an earlier history of the run's name left in Redis is not
    taken for its own. A history begins without a checkpoint and lives on in its checkpoints.
    """

    def __init__(self, config: Config, data: PromptData) -> None:
        self._config, self._data = config, data
        self.history = uuid.uuid4().hex[:8]
        self._lineage = sample_pb2.Lineage(data=data.version, code=code_version(), config=config_version(config))

    def group_id(self, request: int) -> str:
        return f"{self.history}-{request}"

    def request_of(self, group_id: str) -> int | None:
        """The request that a training group's id names; None for an evaluation or another history."""
        named = _GROUP_ID.fullmatch(group_id)
        return int(named[2]) if named and named[1] == self.history else None

    def is_of_another_history(self, group_id: str) -> bool:
        named = _GROUP_ID.fullmatch(group_id)
        return named is not None and named[1] != self.history

    def training_prompt(self, request: int, attempt: int, min_version: int) -> sample_pb2.Prompt:
        sampling = self._config.sampling
        prompt = self._prompt(self._data.train[request], sampling.temperature, min_version)
        prompt.group_id, prompt.request, prompt.attempt = self.group_id(request), request, attempt
        prompt.purpose, prompt.group_size = sample_pb2.PURPOSE_TRAIN, sampling.group_size
        return prompt

    def evaluation_prompts(self, evaluation_id: str, min_version: int) -> list[sample_pb2.Prompt]:
        """For each validation prompt a greedy one and, where samples are asked for, a sampled one."""
        config, rows = self._config.evaluation, self._data.validation.rows
        kinds = [("greedy", 0.0, 1)]
        if config.samples:
            kinds.append(("sampled", self._config.sampling.temperature, config.samples))
        prompts = []
        for kind, temperature, size in kinds:
            for index, row in enumerate(rows[: config.prompts]):
                prompt = self._prompt(row, temperature, min_version)
                prompt.group_id, prompt.request = f"{evaluation_id}-{kind}-{index}", index
                prompt.purpose, prompt.evaluation_id = sample_pb2.PURPOSE_EVALUATION, evaluation_id
                prompt.group_size = size
                prompts.append(prompt)
        return prompts

    def _prompt(self, row: PromptRow, temperature: float, min_version: int) -> sample_pb2.Prompt:
        sampling = self._config.sampling
        return sample_pb2.Prompt(
            prompt_id=row.prompt_id,
            token_ids=row.token_ids,
            text=row.text,
            metadata_json=row.metadata_json,
            sampling=sample_pb2.SamplingParameters(
                temperature=temperature, top_k=sampling.top_k, top_p=sampling.top_p, max_tokens=sampling.max_tokens
            ),
            min_version=min_version,
            lineage=self._lineage,
        )
