"""The environment of tasks that end with the model's first answer, such as a maths problem."""

from midstream.conf.schema import LayerConfig
from midstream.envs.protocol import Observation, Snapshot, Step, Task

_ALWAYS_THE_SAME = Snapshot(id="single-turn", digest="single-turn")


class SingleTurnFactory:
    """Starts environments without any state; the reward is the host's reward model's business."""

    def __init__(self, settings: LayerConfig) -> None:
        pass

    async def start(self, task: Task) -> "SingleTurn":
        return SingleTurn()

    async def resume(self, task: Task, snapshot: Snapshot) -> "SingleTurn":
        return SingleTurn()


class SingleTurn:
    """Takes one action, answers nothing and leaves the reward open."""

    async def reset(self, task: Task) -> Observation:
        return Observation("")

    async def step(self, action: str) -> Step:
        return Step("", done=True)

    async def snapshot(self) -> Snapshot:
        return _ALWAYS_THE_SAME

    async def score(self) -> None:
        return None

    async def close(self) -> None:
        pass
