"""The sample of the local job: the part of slime's ``Sample`` that a rollout touches."""

from argparse import Namespace
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Self

from midstream.hooks.slime.host import Host, register


class LocalHost(Host):
    """The local job as the hooks see it. It runs several strategies in one process, so its state hangs
    on ``args`` instead of being a singleton.
    """

    def generate_state(self, args: Namespace) -> Any:
        return args.generate_state


register(
    LocalHost(
        "midstream.local",
        state="rollout",
        samples="sample",
        prompts="prompts",
        filters="rollout",
        stepwise="rollout.generate_rollout",
    )
)


@dataclass
class Sample:
    """One rollout of one prompt, with slime's field names and meanings."""

    class Status(Enum):
        """Where generation stands."""

        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    group_index: int | None = None
    index: int | None = None
    prompt: str = ""
    tokens: list[int] = field(default_factory=list)
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: float | None = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    rollout_routed_experts: Any = None
    remove_sample: bool = False
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    session_id: str | None = None

    def get_reward_value(self, args: Namespace) -> float:
        """The number that training uses as this sample's reward."""
        assert self.reward is not None
        return self.reward

    def append_response_tokens(
        self,
        args: Namespace | None = None,
        *,
        tokens: list[int],
        log_probs: list[float] | None = None,
        trainable: bool = True,
        meta_info: dict[str, Any] | None = None,
        text: str = "",
    ) -> None:
        """Append tokens of the model (``trainable``, with log-probs) or of the environment.

        Raises:
            ValueError: a model token without log-prob.
        """
        if trainable and len(log_probs or []) != len(tokens):
            raise ValueError(f"{len(tokens)} model tokens but {len(log_probs or [])} log-probs")
        self.tokens = self.tokens + tokens
        self.response += text
        self.response_length += len(tokens)
        self.loss_mask = (self.loss_mask or []) + [int(trainable)] * len(tokens)
        self.rollout_log_probs = (self.rollout_log_probs or []) + (log_probs or [0.0] * len(tokens))
        if meta_info is not None and "weight_version" in meta_info:
            self.weight_versions.append(meta_info["weight_version"])

    def to_dict(self) -> dict[str, Any]:
        """Its fields in a dict; ``from_dict`` is the inverse. Lists and metadata are shared, not copied."""
        return vars(self) | {"status": self.status.value}

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> Self:
        """Rebuild a sample from ``to_dict``; what is no field is set on it, as in slime."""
        sample = cls()
        vars(sample).update(value, status=cls.Status(value["status"]))
        return sample
