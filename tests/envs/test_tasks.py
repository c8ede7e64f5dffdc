"""A tasks file becomes tasks, or an error that names the line and the fix."""

import json

import pytest

from midstream.envs.protocol import Task
from midstream.envs.tasks import TasksError, check_metadata, load_tasks

GOOD = {"prompt": "start f1", "label": None, "metadata": {"files": {"a/b": "x"}, "eval_cmd": "true"}}


def with_metadata(**metadata):
    return {**GOOD, "metadata": {**GOOD["metadata"], **metadata}}


def test_tasks_are_read_in_order_and_unknown_metadata_is_kept(tmp_path):
    path = tmp_path / "tasks.jsonl"
    lines = [{**with_metadata(source="web", workdir="a"), "prompt": prompt} for prompt in ("one", "zwei ü")]
    path.write_text("\n\n".join(map(json.dumps, lines)) + "\n")
    assert load_tasks(path) == [Task(line["prompt"], None, line["metadata"]) for line in lines]


def test_the_key_of_a_task_is_its_content():
    task = Task("p", "l", {"a": 1, "b": [2]})
    assert task.key == Task("p", "l", {"b": [2], "a": 1}).key
    others = [
        Task("q", "l", task.metadata),
        Task("p", None, task.metadata),
        Task("p", "l", {"a": 1, "b": [3]}),
    ]
    assert len({task.key, *(other.key for other in others)}) == 4


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": ', "broken JSON at column 12"),
        ("[1]", "expected an object with prompt, label and metadata, found a list"),
        (b'"\xff"', "not UTF-8 at byte 2"),
        ({"metadata": {}}, "the key 'prompt' is missing"),
        ({"prompt": "p"}, "the key 'metadata' is missing"),
        ({**GOOD, "prompt": 7}, "prompt must be a string, found int 7"),
        ({**GOOD, "label": []}, "label must be a string or null, found a list"),
        ({**GOOD, "metadata": {}}, "the key 'metadata.eval_cmd' is missing"),
        (with_metadata(files=["a"]), "metadata.files must be an object, found a list"),
        (with_metadata(files={"a": 1}), "metadata.files['a'] must be a string, found int 1"),
        (with_metadata(files={"../a": ""}), "the path '../a' leaves the sandbox"),
        (with_metadata(files={"/etc/passwd": ""}), "the path '/etc/passwd' leaves the sandbox"),
        (with_metadata(files={"a\0": ""}), "leaves the sandbox"),
        (with_metadata(files={".": ""}), "give each file a relative path"),
        (with_metadata(workdir="a/../.."), "the path 'a/../..' leaves the sandbox"),
        (with_metadata(pre_commands="true"), "metadata.pre_commands must be a list, found a string"),
        (with_metadata(pre_commands=["true", None]), "metadata.pre_commands[1] must be a string, found null"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    path = tmp_path / "tasks.jsonl"
    content = (
        line if isinstance(line, bytes) else (line if isinstance(line, str) else json.dumps(line)).encode()
    )
    path.write_bytes(json.dumps(GOOD).encode() + b"\n\n" + content + b"\n")
    with pytest.raises(TasksError) as raised:
        load_tasks(path, check_metadata)
    assert str(raised.value).startswith(f"{path}:3: ")
    assert message in str(raised.value)


def test_what_no_workspace_is_made_of_is_its_environments_to_check(tmp_path):
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps({"prompt": "count down", "metadata": {"from": 4}}) + "\n")
    assert load_tasks(path) == [Task("count down", None, {"from": 4})]
    with pytest.raises(TasksError, match=r"tasks.jsonl:1: the key 'metadata.eval_cmd' is missing"):
        load_tasks(path, check_metadata)
    path.write_text(json.dumps({"prompt": "count down", "metadata": {"midstream": {}}}) + "\n")
    with pytest.raises(TasksError, match="use another key"):
        load_tasks(path)


def test_a_missing_and_an_empty_file_are_errors(tmp_path):
    with pytest.raises(TasksError, match=r"none\.jsonl: cannot read the tasks file: No such file"):
        load_tasks(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n \n")
    with pytest.raises(TasksError, match=r"empty\.jsonl: the tasks file holds no task"):
        load_tasks(tmp_path / "empty.jsonl")
