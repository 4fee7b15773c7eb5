from __future__ import annotations

import io
import json
import math
import re
import threading
from dataclasses import dataclass, field

import pytest
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from turnwise.arena.recording.lossless_json import decode, encode
from turnwise.arena.recording.recorder import EpisodeRecorder, comparable
from turnwise.tasks.tiny import build_tokenizer
from turnwise.train.config.schema import TrainConfig
from turnwise.train.eval.evaluate import Evaluation
from turnwise.train.eval.statistics import Estimate
from turnwise.train.log.lines import read_metrics, read_rows
from turnwise.train.log.run_log import RunLog, token_texts
from turnwise.types import Actor, EpisodeRequest, GenerateResult, Rollout, Step


class Recorder:
    """A writer that keeps what it is told."""

    def __init__(self):
        self.told = []

    def log(self, step, metrics):
        self.told.append((step, dict(metrics)))

    def rewind(self, step):
        self.told.append(("rewind", step))

    def close(self):
        self.told.append(("close",))


def test_a_line_a_step_and_a_few_rollouts(tmp_path):
    log = RunLog.from_config(TrainConfig(run_dir=tmp_path, log={"rollouts_per_step": 1}))
    results = [GenerateResult(Rollout(f"r{i}", "x", {"q": i}, error="boom" if i == 2 else None)) for i in range(3)]
    with log:
        log.step(1, {"reward": 0.5}, results)
        log.step(2, {"reward": 0.75})
    assert read_metrics(tmp_path) == [{"step": 1, "reward": 0.5}, {"step": 2, "reward": 0.75}]
    rollouts = [json.loads(line) for line in (tmp_path / "rollouts.jsonl").read_text().splitlines()]
    assert [(line["step"], line["id"], line["error"]) for line in rollouts] == [(1, "r0", None), (1, "r2", "boom")]


def test_recorded_episodes_are_of_different_questions_and_a_file_gets_a_line_per_step(tmp_path):
    out = io.StringIO()
    log = RunLog(tmp_path, 3, rollouts_per_step=3, console=Console(file=out, width=20))
    results = [GenerateResult(Rollout(f"r{i}", "x", i), group_id=i // 3) for i in range(6)]
    log.step(1, {"validation": 0.25, "reward/a": 0.5, "staleness": 0.0, "tokens_per_second": 9930.0}, results)
    assert [row["id"] for row in read_rows(tmp_path / "rollouts.jsonl")] == ["r0", "r1", "r3"]
    assert out.getvalue().splitlines()[0] == "step 1: reward/a 0.5  tok/s 9,930"
    RunLog(tmp_path, 3, console=Console(file=out), progress=False).step(3, {"reward": 0.5})
    assert "step 3" not in out.getvalue()


def test_warnings_are_printed_and_kept(tmp_path):
    out = io.StringIO()
    log = RunLog(tmp_path, 3, console=Console(file=out, width=200))
    log.warn(1, "no sample trains")
    log.warn(3, "a ratio of 30")
    assert out.getvalue().splitlines() == ["step 1: no sample trains", "step 3: a ratio of 30"]
    log.rewind(2)
    log.warn(3, "a ratio of 40")
    kept = [{"step": 1, "warning": "no sample trains"}, {"step": 3, "warning": "a ratio of 40"}]
    assert read_metrics(tmp_path, "warnings.jsonl") == kept


def test_extras_that_json_cannot_hold_do_not_end_a_run(tmp_path):
    extras = {(0, 1): {"seat": 2}, "lock": threading.Lock(), "moves": (1, 2)}
    RunLog(tmp_path, 1).step(1, {}, [GenerateResult(Rollout("r0", "x", Actor("solver"), extras=extras))])
    line = json.loads((tmp_path / "rollouts.jsonl").read_text())
    assert (line["extras"]["(0, 1)"], line["extras"]["moves"]) == ({"seat": 2}, [1, 2])
    assert "lock" in line["extras"]["lock"] and line["artifact"]["id"] == "solver"


@dataclass
class Unset:
    value: int = field(init=False)


class Untold:
    def __init__(self, error=KeyError):
        self.error = error

    def __repr__(self):
        raise self.error

    __str__ = __repr__


class Odd(Untold):
    """Its hash is fine, and nothing else."""

    @property
    def shape(self):
        raise self.error


class Scalar:
    shape = ()

    def item(self):
        return self


def looped():
    around = {"list": [1]}
    around["list"] += [around, (around,)]
    return around


def deep(levels=5000):
    value = []
    for _ in range(levels):
        value = [value]
    return value


VALUES = {
    "in itself": (looped, {"list": [1, "<dict in itself>", ["<dict in itself>"]]}),
    "no text": (Untold, "<Untold, whose text raised KeyError>"),
    "a text that exits": (lambda: Untold(SystemExit), "<Untold, whose text raised SystemExit>"),
    "a key without text": (lambda: {Odd(): 1}, {"<Odd, whose text raised KeyError>": 1}),
    "a set without text": (lambda: [{Odd()}], ["<set, whose text raised KeyError>"]),
    "a field that is unset": (Unset, "<Unset, whose text raised AttributeError>"),
    "deep": (deep, ...),
    "long": (lambda: 10**6000, hex(10**6000)),
    "half a character": (lambda: "\ud83d", "\ud83d"),
    "a number that is itself": (Scalar, ...),
}
PLACES = ("extras", "meta", "artifact", "info", "request", "metrics")


@pytest.mark.parametrize("kind", VALUES)
def test_no_value_ends_a_run_that_records_it(tmp_path, kind):
    make, written = VALUES[kind]
    for place in PLACES:
        value, folder = make(), tmp_path / place
        named = {each: {"value": value} if each == place else {} for each in PLACES}
        step = Step("solver", 0, [], "4", [1], [2], [-0.1], [(1, 0)], "stop", info=named["info"])
        rollout = Rollout("r0", "x", None, steps=[step], extras=named["extras"], meta=named["meta"])
        rollout.artifact = named["artifact"]
        result = GenerateResult(rollout)
        result.recording = EpisodeRecorder(EpisodeRequest("x", named["request"]), 0, {})
        RunLog(folder, 1).step(1, {"reward": 1.0, **named["metrics"]}, [result])
        [row] = [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]
        found = {**row, "info": row["steps"][0]["info"], "metrics": read_metrics(folder)[0]}
        assert place == "request" or written in (..., found[place]["value"]), place
    comparable(make())


def test_values_that_contain_themselves_are_recorded_exactly():
    again = decode(encode(looped()))
    assert again["list"][1] is again and again["list"][2] == (again,)


@pytest.mark.parametrize("text", ["task_options.form [INST]ask[/INST] -> ask", "runs/[wip]lr", ":smile: " + "x" * 300])
@pytest.mark.parametrize("terminal", [False, True])
def test_a_note_is_text(tmp_path, text, terminal):
    """As it is: not parsed, not replaced, not cut into lines."""
    out = io.StringIO()
    with RunLog(tmp_path, 1, console=Console(file=out, width=80, force_terminal=terminal)) as log:
        log.note(text)
        log.warn(1, text)
    plain = re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", out.getvalue())
    assert f"{text}\n" in plain and f"step 1: {text}\n" in plain


def test_the_held_out_result_is_in_a_file_until_its_step_is_undone(tmp_path, capsys):
    each = Estimate(0.5, 0.25, 0.75, 8, "t")
    result = Evaluation(0.5, 0.25, math.inf, 8, 0, 99, {}, by_task={"[/b]": each})
    log = RunLog(tmp_path, 3)
    log.held_out(2, result)
    shown = json.loads((tmp_path / "held_out.json").read_text())
    assert (shown["step"], shown["success"], shown["high"], shown["by_task"]["[/b]"]["low"]) == (2, 0.5, None, 0.25)
    assert capsys.readouterr().out.splitlines() == [
        "held-out success 50.0% (8 questions: no 95% interval)",
        "  [/b]: 50.0% (95% interval 25.0%–75.0%)",
    ]
    log.rewind(2)
    assert (tmp_path / "held_out.json").exists()
    log.rewind(1)
    assert not (tmp_path / "held_out.json").exists()


def test_rewind_drops_later_and_broken_lines(tmp_path):
    log = RunLog(tmp_path, 3)
    for step in (1, 2, 3):
        log.step(step, {"reward": step})
    with (tmp_path / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 1, "rew')
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 3]
    log.rewind(2)
    log.step(3, {"reward": 9})
    assert [line["reward"] for line in read_metrics(tmp_path)] == [1, 2, 9]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b'{"step": 2, "re\xffward": 1}', "not UTF-8 .invalid start byte at byte 15"),
        (b'{"step": 2, "rew', "Invalid control character"),
        (b"\0\0\0", "Expecting value"),
        (b'{"reward": 1}', "'step'"),
        (b"[2]", "list indices"),
    ],
)
def test_a_bad_line_is_named_and_nothing_is_dropped(tmp_path, line, why):
    """A bad byte was told without file or line, and a line that is no JSON was dropped in silence."""
    path = tmp_path / "metrics.jsonl"
    content = b'{"step": 1, "reward": 1}\n' + line + b'\n{"step": 3, "reward": "\xe2\x80\xa8"}\n'
    path.write_bytes(content)
    for read in (lambda: read_metrics(tmp_path), lambda: RunLog(tmp_path, 3).rewind(1)):
        with pytest.raises(ValueError, match=f"{re.escape(str(path))}, line 2: expected a JSON object .*{why}"):
            read()
    assert path.read_bytes() == content and list(tmp_path.iterdir()) == [path]


def test_a_line_that_a_kill_cut_off_is_left_out_wherever_it_was_cut(tmp_path):
    path, whole = tmp_path / "metrics.jsonl", '{"step": 1, "name": "ä\u2028"}\n'.encode()
    for length in range(len(whole) - 1):
        path.write_bytes(whole + whole[:length])
        assert len(read_metrics(tmp_path)) == 1
        assert RunLog(tmp_path, 3).rewind(1) == 0 and path.read_bytes() == whole


def test_every_sink_hears_everything_and_is_closed_when_a_run_fails(tmp_path):
    writers = [Recorder(), Recorder()]
    log = RunLog(tmp_path, 3, writers=writers)
    log.rewind(1)
    with pytest.raises(RuntimeError, match="a dead server"), log:
        log.step(2, {"reward": 0.5})
        raise RuntimeError("a dead server")
    for writer in writers:
        assert writer.told == [("rewind", 1), (2, {"reward": 0.5}), ("close",)]


def test_logs_are_opened_first_and_closed_if_one_of_them_fails(tmp_path):
    class Opened(Recorder):
        def open(self):
            self.told.append("open")

    class Broken(Recorder):
        def open(self):
            raise ValueError("no key")

    good, bare = Opened(), Recorder()
    with RunLog(tmp_path, 3, writers=[good, bare]):
        assert (good.told, bare.told) == (["open"], [])
    assert good.told == ["open", ("close",)]
    with pytest.raises(ValueError, match="no key"), RunLog(tmp_path, 3, writers=[good, Broken()]):
        pytest.fail("the block ran")
    assert good.told == ["open", ("close",)] * 2
    with pytest.raises(RuntimeError), RunLog(tmp_path, 3, writers=[good]).opened():
        raise RuntimeError("the start failed")
    assert good.told == ["open", ("close",)] * 3


def test_tokens_are_written_as_text_in_nested_episodes_too(tmp_path):
    tokenizer = build_tokenizer(["0123456789"], vocab_size=300)
    ids = tokenizer.encode("4 2", add_special_tokens=False)
    step = Step("solver", 0, [], "4 2", [1], ids, [-0.1] * len(ids), [(len(ids), 0)], "stop")
    nested = GenerateResult(Rollout("r0.0", "y", None, steps=[step]), is_trainable=False)
    log = RunLog(tmp_path, 1, tokenizer=tokenizer)
    log.step(1, {}, [GenerateResult(Rollout("r0", "x", None, steps=[step]), children=[nested])])
    line = json.loads((tmp_path / "rollouts.jsonl").read_text())
    assert line["steps"][0]["completion_tokens"] == ["4", " ", "2"]
    assert line["children"][0]["steps"][0]["completion_tokens"] == ["4", " ", "2"]
    assert (line["is_trainable"], line["children"][0]["is_trainable"]) == (True, False)


# ---- A text per token: joined they are the whole text, whatever bytes the tokens cut ---------------------------------
@pytest.mark.parametrize("text", ["", "1 2\n3", "a 🎲 b", "</script><b>", "naïve – 数独", "tail 🎲"])
def test_joined_they_are_the_text(text):
    tokenizer = build_tokenizer(["hello world", "0123456789"], vocab_size=300)
    ids = tokenizer.encode(text, add_special_tokens=False)
    texts = token_texts(tokenizer, ids)
    assert len(texts) == len(ids)
    assert "".join(texts) == text


def test_special_characters_tokens_and_spaces():
    tokenizer = build_tokenizer(["0123456789"], vocab_size=300)
    ids = [*tokenizer.encode("1🎲2", add_special_tokens=False), tokenizer.eos_token_id]
    assert token_texts(tokenizer, ids) == ["1", "", "", "", "🎲", "2", "<|end|>"]
    # Broken bytes end somewhere.
    half = tokenizer.encode("🎲", add_special_tokens=False)[:2]
    assert "".join(token_texts(tokenizer, half * 20)).count("\ufffd") >= 1
    assert token_texts(tokenizer, half)[-1].startswith("\ufffd")
    # A space that decoding alone would drop is kept.
    pieces = Tokenizer(models.WordLevel({"▁one": 0, "▁two": 1, "?": 2}, unk_token="?"))
    pieces.pre_tokenizer = pre_tokenizers.Metaspace()
    pieces.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=pieces, clean_up_tokenization_spaces=False)
    assert tokenizer.decode([1]) == "two"
    assert token_texts(tokenizer, [0, 1]) == ["one", " two"]
