"""What is left to do when a backend closes is done, with what that in turn asks for."""

import threading
import time

import pytest

from midstream.envs.sandboxes.overlay.background import Background


def test_work_that_asks_for_more_while_it_closes_gets_it(caplog: pytest.LogCaptureFixture):
    background = Background("test")
    closing = threading.Event()
    done: list[str] = []

    def last() -> None:
        assert closing.wait(10)
        background.run(lambda: done.append("asked for"))
        done.append("last")

    background.run(last)
    closer = threading.Thread(target=background.close)
    closer.start()
    with pytest.raises(RuntimeError, match="after shutdown"):
        while True:
            background._thread.submit(time.sleep, 0)
    closing.set()
    closer.join(10)
    assert sorted(done) == ["asked for", "last"]
    assert not caplog.records


def test_what_fails_is_logged_and_the_rest_is_done(caplog: pytest.LogCaptureFixture):
    background = Background("test")
    done = []
    background.run(lambda: 1 // 0)
    background.run(lambda: done.append("next"))
    background.close()
    assert done == ["next"]
    assert "ZeroDivisionError" in caplog.text
