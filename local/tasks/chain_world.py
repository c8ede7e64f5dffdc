"""chain-fix without a shell: the rules in Python, for demonstrations and for checks against the real ones."""

from midstream.local.tasks.chain_fix import SUBMIT, ChainTask


class ChainWorld:
    """The state of one workspace; `step` answers as the shell functions in the task's `.bashrc` do."""

    def __init__(self, task: ChainTask) -> None:
        self.lines = dict(task.lines)
        self.submitted = False
        self._task = task

    def step(self, action: str) -> str:
        """Execute one action and return its observation."""
        match action.split():
            case ["cat", name] if name in self.lines:
                return self.lines[name]
            case ["fix", name] if name in self.lines:
                state, pointer = self.lines[name].split(" ", maxsplit=1)
                state = "bad" if state == "ok" else "ok"
                self.lines[name] = f"{state} {pointer}"
                return state
            case [command, *_] if command == SUBMIT:
                self.submitted = True
                return "done"
            case _:
                return "error"

    def solved(self) -> bool:
        """Whether it was submitted with every file of the chain ok and every other one unchanged."""
        task = self._task
        chain_ok = all(self.lines[name].startswith("ok ") for name in task.chain)
        others_same = all(self.lines[n] == line for n, line in task.lines.items() if n not in task.chain)
        return self.submitted and chain_ok and others_same
