"""A task of one's own: by its class, and from the command line, from training to a replay."""

from __future__ import annotations

import json
import sys

import pytest

from turnwise.cli.main import main
from turnwise.run import build as run_module
from turnwise.run.build import build_run
from turnwise.run.checks import dry_run
from turnwise.tasks import OwnTask, build_task
from turnwise.tasks.base import held_out, split_of
from turnwise.train.config.toml import ConfigError
from turnwise.train.validate import config_from_dict

pytestmark = pytest.mark.usefixtures("narrow_model")

MODULE = """
from turnwise import MultiTurnEpisode, Rubric
from turnwise.tasks import OwnOptions, OwnTask
from turnwise.types import TaskCapabilities


def vowels(extras):
    return extras["vowels"]


class Talk(MultiTurnEpisode):
    episode_type = "talk"
    actors = ("ann", "bob", "cid")
    max_turns = 1
    rubric = Rubric([vowels])

    def get_prompt(self, artifact):
        return artifact["question"]

    def get_observation(self, state, arena, artifact):
        return f"The lucky number of {state.current_actor} is {self.rng.randrange(10)}."

    def env_response(self, state, arena, artifact):
        said = state.last_completion_text
        share = sum(letter in "aeiou" for letter in said) / max(1, len(said))
        state.data.setdefault("vowels", {})[state.current_actor] = share

    def get_extras(self, state):
        return {"vowels": dict(state.data["vowels"])}


class Options(OwnOptions):
    words: int = 60


class TalkTask(OwnTask):
    name = "talk"
    success_metric = "vowels/ann"
    system_prompts = {"ann": "You are ann.", "bob": "You are bob.", "cid": "You are cid."}
    options_type = Options
    capabilities = TaskCapabilities(credit_rule="rae", seats=("ann", "bob", "cid"))
    players = {}

    def questions(self):
        return [f"word {number}?" for number in range(self.options.words)]

    def episodes(self, tree=None):
        return {"talk": Talk(sampler=tree)}


class Bare(OwnTask):
    def questions(self):
        return []

    def episodes(self, tree=None):
        return {}


class Other:
    pass


thing = 3
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "own_talk.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    return "own_talk"


def test_questions_are_split_by_their_text_and_drawn_by_seed(module):
    task = build_task(f"{module}:TalkTask", {"words": 80, "max_tokens": 4})
    held_out = {
        split: [r.artifact["question"] for r in task.eval_requests(split, 3)] for split in ("eval", "validation")
    }
    trained = {r.artifact["question"] for step in range(40) for r in task.requests(step, 4, 1)}
    assert all(split_of(question) == split for split, questions in held_out.items() for question in questions)
    assert {split_of(question) for question in trained} == {"train"} and len(trained) > 40
    assert task.requests(3, 4, 2) == build_task(f"{module}:TalkTask", {"words": 80, "max_tokens": 4}).requests(3, 4, 2)
    assert task.requests(3, 4, 2) != task.requests(4, 4, 2)
    assert [actor.max_tokens for actor in task.actors] == [4, 4, 4]
    with pytest.raises(ValueError, match=r"n=99: the eval split of task 'talk' has \d+ questions"):
        task.eval_requests("eval", 99)
    with pytest.raises(ValueError, match=r"'talk' has no demonstrations: .*warm_start.steps = 0"):
        task.demonstrations(4, 0)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own_talk:Tolk", r"'own_talk:Tolk': no 'Tolk' in it; did you mean 'Talk'"),
        ("no_such_module:A", "no_such_module"),
        ("own_talk:Other", r"task='own_talk:Other': it lacks actors, demonstrations, .*turnwise.tasks.OwnTask"),
        ("own_talk:thing", r"task='own_talk:thing': it is no class"),
        ("own_talk:Bare", r"Bare.name: expected a name"),
        ("talk", r"task='talk': unknown; .*'module:Class' for your own"),
    ],
)
def test_what_is_no_task_is_told(module, name, message):
    with pytest.raises(ValueError, match=message):
        build_task(name)


def test_options_are_those_of_the_class(module):
    with pytest.raises(ValueError, match=r"unknown option 'word'; did you mean 'words'"):
        build_task("own_talk:TalkTask", {"word": 3})


def test_success_must_be_named():
    class Unmeasured(OwnTask):
        name, system_prompts = "unmeasured", {"solver": ""}

        def questions(self):
            return ["a"]

        def episodes(self, tree=None):
            return {}

    with pytest.raises(ValueError, match=r"success_metric='': expected 'function/actor', .*, or 'function'"):
        Unmeasured()


def asking(given):
    class Asking(OwnTask):
        name, success_metric, system_prompts = "asking", "right/solver", {"solver": "Answer."}

        def questions(self):
            return given

        def episodes(self, tree=None):
            return {}

    return Asking()


ROWS = [{"question": f"{a} + 1", "answer": [a + 1, {"even": a % 2}]} for a in range(60)]


@pytest.mark.parametrize(
    ("given", "artifact"),
    [
        (ROWS, lambda row: row),
        ([tuple(row.values()) for row in ROWS], lambda row: {"question": list(row.values())}),
        (range(60), lambda row: {"question": row["answer"][0] - 1}),
        ((row["question"] for row in ROWS), lambda row: {"question": row["question"]}),
    ],
    ids=["dicts", "tuples", "numbers", "generator of texts"],
)
def test_rows_of_a_dataset_are_questions(given, artifact):
    """Dicts failed as unhashable, tuples and numbers with a raw error."""
    given = list(given) if isinstance(given, (list, range)) else given
    task = asking(given)
    pool = task.question_pool(None) if isinstance(given, list) else task.question_pool(2)
    known = [artifact(row) for row in ROWS]
    assert len(pool) > 1 and all(request.artifact in known for request in pool)
    assert len({request.group_id for request in pool}) == len({request.seed for request in pool}) == len(pool)
    if isinstance(given, list):
        held = task.eval_requests("eval", 2)
        assert not {request.group_id.partition("/")[2] for request in pool} & {
            request.group_id.partition("/")[2] for request in held
        }
        assert any("1" in text for text in task.texts())
        twice = asking([*given, *given])
        assert twice.question_pool(None) == pool, "equal rows are one question"


def test_copies_of_a_row_share_nothing_that_an_episode_could_change():
    first, second = asking(ROWS).requests(1, 1, 2)
    first.artifact["answer"].append("spoiled")
    assert second.artifact in ROWS


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            [{"a": {1, 2}}],
            r"Asking.questions\(\), question 0: {'a': {1, 2}} is no question: expected a text, or data that JSON",
        ),
        (["a", b"b"], r"Asking.questions\(\), question 1: b'b' is no question: expected a text"),
        ([float("nan")], r"question 0: nan is no question: expected a text"),
        (None, r"Asking.questions\(\) gave None: expected a list of questions"),
        ("What?", r"Asking.questions\(\) gave 'What\?': expected a list of questions"),
        ({"question": "What?"}, r"Asking.questions\(\) gave .*: expected a list of questions"),
    ],
)
def test_what_is_no_question_is_told(given, told):
    with pytest.raises(ValueError, match=told):
        held_out(asking(given), "eval", None)


def test_fewer_questions_than_the_default_are_all_asked(module, tmp_path, capsys):
    """A task of 300 questions has some 30 held out, and was refused for not having the default's 200."""
    settings = {"task": "own_talk:TalkTask", "run_dir": str(tmp_path / "run"), "task_options": {"words": 300}}
    run = build_run(config_from_dict(settings | {"eval": {"every": 1}}))
    questions = [f"word {number}?" for number in range(300)]
    expected = {split: sum(split_of(one) == split for one in questions) for split in ("eval", "validation")}
    assert len(run.held_out.requests) == expected["eval"] < 200
    assert len(run.trainer.validation.requests) == expected["validation"]
    said = f"task 'talk' has {min(expected.values())} held-out questions, fewer than the default of 200"
    assert capsys.readouterr().out.replace("\n", " ").count(said) == 1
    with pytest.raises(
        ConfigError, match=r"'eval.num_prompts' = 200: n=200: the eval split of task 'talk' has \d+ ques"
    ):
        build_run(config_from_dict(settings | {"eval": {"num_prompts": 200}}))


@pytest.mark.parametrize("there", [0, 1, 2, 137, 199, 200, 201])
def test_the_default_is_as_many_as_there_are_up_to_200(there):
    class Counted:
        def eval_requests(self, split, n):
            if n > there:
                raise ValueError(f"n={n}: {there} questions")
            return list(range(n))

    if not there:
        with pytest.raises(ValueError, match="n=1: 0 questions"):
            held_out(Counted(), "eval", None)
    else:
        assert held_out(Counted(), "eval", None) == list(range(min(there, 200)))


def test_a_metric_that_the_rubric_does_not_make_is_refused_before_models_are_loaded(module, tmp_path, monkeypatch):
    monkeypatch.setattr(run_module, "load_models", lambda *_, **__: pytest.fail("models were loaded"))
    (tmp_path / "own_talk_unmeasured.py").write_text(MODULE.replace('"vowels/ann"', '"vowel/ann"'))
    told = r"success_metric='vowel/ann': the rubric of episode 'talk' has no function 'vowel'; did you mean 'vowels'"
    for start in (build_run, dry_run):
        with pytest.raises(ConfigError, match=told):
            start(config_from_dict({"task": "own_talk_unmeasured:TalkTask", "run_dir": str(tmp_path / "run")}))


@pytest.mark.parametrize(
    ("declared", "told"),
    [
        ("", r"success_metric='vowels/an': 'an' is no actor of the task, nor in its .*; did you mean 'ann'"),
        (', measured=("an",)', ""),
    ],
)
def test_a_metric_of_no_actor_is_refused_unless_the_task_declares_it(module, tmp_path, declared, told):
    """It failed at the final evaluation, after the whole training."""
    source = MODULE.replace('"vowels/ann"', '"vowels/an"').replace('"cid"))', f'"cid"){declared})')
    (tmp_path / "own_talk_an.py").write_text(source)
    sys.modules.pop("own_talk_an", None)
    config = config_from_dict({"task": "own_talk_an:TalkTask", "run_dir": str(tmp_path / "run")})
    if not told:
        assert dry_run(config)
        return
    for start in (build_run, dry_run):
        with pytest.raises(ConfigError, match=told):
            start(config)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('"cid"))', '"cit"))', "capabilities.seats: the task has no actor 'cit'; did you mean 'cid'"),
        ('"talk": Talk(', '"talks": Talk(', "questions are of episode 'talk', .*did you mean 'talks'"),
        ('"cid": "You', '"cit": "You', "episode 'talk': the task has no actor 'cid'; did you mean 'cit'"),
        ('actors = ("ann", "bob", "cid")', "", "Talk.actors is empty: expected the ids of the actors"),
        ("Talk(sampler=tree)", "Talk", "episode 'talk': got the class Talk, expected an Episode object"),
        ("rubric = Rubric([vowels])", "", r"episode 'talk' \(Talk\) has no rubric"),
        ("Talk(sampler=tree)", "Ask()", "the episode names no actor, and the arena has .'ann', 'bob', 'cid'"),
        ('"talk": Talk(sampler=tree)', '"talk": Talk(), "ask": Named()', "episode 'ask': the task has no actor 'dan'"),
        ("players = {}", "def requests(self, *given):\n"
         "        return [replace(one, episode_type='x') for one in super().requests(*given)]",
         "its questions are of episode 'x', which episodes"),
        ("players = {}", "actors = [Actor(name) for name in ('ann', 'ann', 'bob', 'cid')]",
         "actor id 'ann' is already registered"),
        ("players = {}", "actors = [Actor(name, tools=[lambda a: a]) for name in ('ann', 'bob', 'cid')]",
         "tools: lambda has no schema"),
        ("words: int = 60", "words: int = 20", "'rollout.prompts_per_step' = 40: n=40: the train split of"),
    ],
)  # fmt: skip
def test_names_that_do_not_fit_are_refused_by_a_dry_run(module, tmp_path, old, new, told):
    """They failed after the training had begun."""
    more = """
from dataclasses import replace
from turnwise import Actor, SingleTurnEpisode


class Ask(SingleTurnEpisode):
    rubric = Rubric([vowels])
    get_prompt = str


class Named(Ask):
    actor = "dan"


class TalkTask"""
    source = MODULE.replace(old, new).replace("\nclass TalkTask", more)
    assert source.count(new)
    name = f"own_talk_{abs(hash((old, new)))}"
    (tmp_path / f"{name}.py").write_text(source)
    prompts = {"rollout": {"prompts_per_step": 40}} if "prompts" in told else {}
    with pytest.raises(ConfigError, match=told) as raised:
        dry_run(config_from_dict({"task": f"{name}:TalkTask", "run_dir": str(tmp_path / "run"), **prompts}))
    assert len(set(lines := str(raised.value).splitlines())) == len(lines)


def test_the_command_line_trains_evaluates_credits_replays_and_lets_it_play(module, tmp_path, capsys):
    settings = {
        "task": "own_talk:TalkTask", "run_dir": "runs/talk", "steps": 2, "threads": 1,
        "task_options.words": 70, "task_options.max_tokens": 5, "policies.default.path": "tiny",
        "rollout.prompts_per_step": 2, "rollout.group_size": 2, "rollout.check_private": "true", "eval.num_prompts": 2,
        "log.rollouts_per_step": 9, "checkpoint.every": 1, "health.start_questions": 0,
    }  # fmt: skip
    (tmp_path / "empty.toml").write_text("")
    overrides = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    assert main(["train", "empty.toml", *overrides, "--traceback"]) == 0
    rows = [json.loads(line) for line in (tmp_path / "runs/talk/rollouts.jsonl").read_text().splitlines()]
    assert [row["episode_type"] for row in rows] == ["talk"] * 8 and all(row["error"] is None for row in rows)
    capsys.readouterr()
    told = {}
    for command in ("eval", "credit", "replay", "tournament"):
        extra = ["--games", "3"] if command == "tournament" else []
        assert main([command, "runs/talk", *extra, "--traceback"]) == 0
        told[command] = capsys.readouterr().out
    assert "reward/cid" in told["eval"]
    assert "rule 'rae' gives 24 of them back exactly" in told["credit"]
    assert "bit for bit: 3 model calls" in told["replay"]
    assert "talk/step_00000002" in told["tournament"]
