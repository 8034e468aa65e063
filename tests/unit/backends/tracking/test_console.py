"""The console tracker: plain lines without a terminal, a display that fits on one, and nothing that makes it raise."""

from __future__ import annotations

import io
import math
import re
import sys

import pytest
from rich.console import Console as RichConsole
from rich.text import Text

from posttrain.backends.tracking import console
from posttrain.backends.tracking.console import Console, StepClock, duration, end_of, short, step_line
from posttrain.config import RunConfig
from posttrain.registry import TRACKERS

CONFIG = RunConfig.model_validate(
    {"model": {"path": "models/tiny/"}, "data": {"train_files": ["t.parquet"]}, "run": {"name": "demo"}}
)
METRICS = {
    "reward/mean": 0.412,
    "response/length_mean": 14.0,
    "speed/rollout_tokens_per_s": 612.4,
    "gap/mean": 0.0021,
    "policy/grad_norm": 0.8,
}


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def run(stream: io.StringIO, metrics: dict[str, float], steps: int = 3) -> str:
    tracker = Console(stream)
    tracker.begin(CONFIG, total_steps=steps, first_step=1)
    tracker.phase("validation", 0, 100)
    tracker.log(0, {"validation/sum/accuracy": 0.25, "validation/sum/length_mean": 9.0, "time/step_s": 3.0})
    for step in range(1, steps + 1):
        tracker.phase("rollout", step, 1000)
        for _ in range(1000):
            tracker.advance(1)
        tracker.phase("checkpoint", step)
        tracker.log(step, metrics)
    tracker.close()
    tracker.close()
    return stream.getvalue()


def test_console_is_found_by_name() -> None:
    assert TRACKERS.get("console") is Console


def test_console_without_a_terminal_writes_one_plain_line_per_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as CI services do; a pipe is a pipe all the same
    monkeypatch.setattr(console.time, "monotonic", lambda: 0.0)
    assert run(io.StringIO(), METRICS).splitlines() == [
        "demo: tiny, 3 steps",
        "validation at step 0  sum  accuracy 0.25  length 9",
        "step 1/3  reward 0.41  length 14  tokens/s 612  gap 0.0021  left 0:00",
        "step 2/3  reward 0.41  length 14  tokens/s 612  gap 0.0021  left 0:00",
        "step 3/3  reward 0.41  length 14  tokens/s 612  gap 0.0021  left 0:00",
    ]


def test_console_says_where_validation_began() -> None:
    text = run(io.StringIO(), {**METRICS, "validation/sum/accuracy": 0.5}, steps=1)
    assert text.splitlines()[-1] == "validation at step 1  sum  accuracy 0.50 (at first 0.25)"


def test_console_flushes_every_line() -> None:
    class Counting(io.StringIO):
        flushes = 0

        def flush(self) -> None:
            Counting.flushes += 1

    text = run(Counting(), METRICS)
    assert Counting.flushes == len(text.splitlines()) == 5


def test_console_plain_lines_stay_within_80_characters() -> None:
    numbers = dict.fromkeys(METRICS, -123456.789) | {"gap/mean": -0.0021}
    line = step_line(100000, 100000, numbers, 359999.0)
    # step 100000/100000 (18) + 2 + reward -123457 (14) + 2 + length -123457 (14) + 2 + tokens/s -123457 (16) + 2
    # + left 99:59:59 (13) = 83: the gap and then the speed go.
    assert line == "step 100000/100000  reward -123457  length -123457  left 99:59:59"
    text = run(io.StringIO(), {f"validation/{'x' * 200}/accuracy": 0.5, **numbers})
    assert max(len(line) for line in text.splitlines()) == 80


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, None, "many", 10**400, 1e300, -0.0])
@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_console_never_raises_for_odd_numbers(stream: type[io.StringIO], value: object) -> None:
    odd = dict.fromkeys([*METRICS, "validation/sum/accuracy", "validation//accuracy", "validation/accuracy"], value)
    assert "step 3/3" in run(stream(), {**odd, "step/prompts": 8})  # type: ignore[dict-item]


def test_console_never_raises_for_missing_metrics() -> None:
    assert "step 2/3  left" in run(io.StringIO(), {"step/prompts": 8})
    Console(io.StringIO()).advance(3)


@pytest.mark.parametrize("columns", [80, 60, 30])
def test_console_live_display_fits_the_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    tracker = Console(Terminal())
    tracker.begin(CONFIG, total_steps=60, first_step=1)
    tracker.log(0, {f"validation/{'x' * 100}/accuracy": 0.25, "validation/sum/accuracy": 0.25})
    tracker.log(1, {**METRICS, "validation/sum/accuracy": 0.5})
    tracker.phase("rollout", 2, 4096)
    tracker.advance(1204)
    screen = RichConsole(file=io.StringIO(), width=columns, force_terminal=False)
    screen.print(tracker._render())
    tracker.close()
    lines = screen.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert max(map(len, lines)) <= columns
    assert lines[0].strip() == "demo: tiny"
    for part in ["step 1/60", "rollout", "reward 0.41", "gap 0.0021", "grad norm 0.80", "tokens/s 612", "left"]:
        assert part in "\n".join(lines)
    if columns >= 60:
        assert "1204 tokens" in lines[2]
        assert lines[-1].strip() == "accuracy sum 0.25 at first, now 0.50"


def test_console_expects_a_rollout_to_be_as_long_as_the_last_one() -> None:
    tracker = Console(io.StringIO())
    totals = []
    for step, name, total, done in [(1, "rollout", 4096, 900), (1, "update", 64, 64), (2, "rollout", 4096, 0)]:
        tracker.phase(name, step, total)
        tracker.advance(done)
        assert tracker._phase is not None
        totals.append(tracker._phase.total)
    assert totals == [4096, 64, 900]


def test_console_gives_the_cursor_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    text = run(Terminal(), METRICS)
    assert text.rfind("\x1b[?25l") < text.rfind("\x1b[?25h")  # hidden while it redraws, shown at the end
    assert "done" in plain(text)


def test_console_gives_the_cursor_back_when_nobody_closes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Ctrl-C does: the interpreter ends without close()."""
    monkeypatch.setenv("TERM", "xterm-256color")
    at_exit: list = []
    monkeypatch.setattr(console.atexit, "register", at_exit.append)
    stream = Terminal()
    Console(stream).begin(CONFIG, total_steps=3, first_step=1)
    assert stream.getvalue().rfind("\x1b[?25h") < stream.getvalue().rfind("\x1b[?25l")
    at_exit[0]()
    assert stream.getvalue().rfind("\x1b[?25h") > stream.getvalue().rfind("\x1b[?25l")


def test_console_honours_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    color = re.compile(r"\x1b\[[0-9;]*(?:3[0-8]|9[0-7])[0-9;]*m")
    assert color.search(run(Terminal(), METRICS))
    monkeypatch.setenv("NO_COLOR", "1")
    assert not color.search(run(Terminal(), METRICS))


def test_console_treats_a_dumb_terminal_as_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert "\x1b" not in run(Terminal(), METRICS)


def test_console_writes_control_characters_out() -> None:
    stream = io.StringIO()
    tracker = Console(stream)
    tracker.message("a\x1b[2Jb\u202ec\nsecond line, which may be as long as it likes " + "x" * 60)
    tracker.log(1, {"validation/\x1b]0;title\x07/accuracy": 1.0})
    text = stream.getvalue()
    assert text.splitlines()[0] == "a\\u001b[2Jb\\u202ec"
    assert "\x1b" not in text and "\x07" not in text


def test_console_survives_an_ascii_stream() -> None:
    raw = io.BytesIO()
    tracker = Console(io.TextIOWrapper(raw, encoding="ascii"))  # type: ignore[arg-type]
    tracker.message("accuracy → 0.5")
    assert raw.getvalue() == b"accuracy ? 0.5\n"


def test_console_writes_to_standard_output_unless_told(capsys: pytest.CaptureFixture[str]) -> None:
    Console().message("saved global_step_3")
    assert capsys.readouterr().out == "saved global_step_3\n"
    assert sys.stdout.isatty() is False


def test_console_time_left_is_the_mean_step_times_the_steps_to_go(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    clock = StepClock()
    assert clock.seconds_left(10) is None
    clock.start()
    for step, end in [(1, 104.0), (2, 110.0)]:
        now[0] = end
        clock.tick(step)
        clock.tick(step)  # a second report about the same step
    assert clock.seconds_left(10) == 8 * 5.0  # (110 - 100) / 2 = 5 s a step, 8 to go
    now[0] = 113.0
    assert clock.seconds_left(10) == 37.0  # 3 s of the third are over


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.412, "0.41"), (0.4, "0.40"), (0.0021, "0.0021"), (14.0, "14"), (14.26, "14.3"), (612.4, "612"), (0.0, "0")]
    + [(3.1e-5, "3.1e-05"), (2.5e7, "2.5e+07"), (-0.25, "-0.25"), (math.nan, "nan")],
)
def test_console_numbers_are_short(value: float, text: str) -> None:
    assert short(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(200, "3:20"), (3800, "1:03:20"), (0.4, "0:00"), (None, "-:--"), (math.inf, "-:--")]
)
def test_console_durations(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


def plain(text: str) -> str:
    """The text without its ANSI codes."""
    return Text.from_ansi(text).plain


def test_console_shows_losses_where_texts_are_learned() -> None:
    metrics = {
        "data/learned_tokens": 53.0,
        "policy/loss": 2.34,
        "speed/update_tokens_per_s": 612.4,
        "policy/grad_norm": 0.8,
    }
    assert step_line(3, 12, metrics, 200.0) == "step 3/12  loss 2.34  tokens/s 612  left 3:20"
    assert (
        "validation at step 1  loss 1.50"
        in run(io.StringIO(), metrics | {"validation/loss": 1.5}, steps=1).splitlines()
    )


def test_names_that_are_too_long_keep_their_ends() -> None:
    assert end_of("arithmetic/products", 13) == "...c/products"
    assert end_of("arithmetic/sums", 15) == "arithmetic/sums"
