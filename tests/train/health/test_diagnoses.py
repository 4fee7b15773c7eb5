"""Each diagnosis names the tiny run that has the illness, and no healthy run of the recorded tables."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from turnwise.arena import Arena, Filters, MultiTurnEpisode, Rubric
from turnwise.credit import DrMASCredit
from turnwise.inference import ScriptedClient
from turnwise.inference.scripted import ByteTokenizer
from turnwise.train import EvalSet, Policy, Trainer
from turnwise.train.health import diagnose as begun
from turnwise.train.health.diagnose import Diagnoser, diagnose
from turnwise.train.health.diagnoses import DIAGNOSES, EXPLORES
from turnwise.train.health.history import Facts
from turnwise.train.log.lines import read_metrics
from turnwise.train.log.run_log import RunLog
from turnwise.train.validate import config_from_dict
from turnwise.types import Actor, EpisodeRequest, Sampling

TABLES = sorted(Path(__file__).with_name("tables").glob("*.jsonl"))
ACTORS = ("first", "second")


def words(request, tokenizer):
    """Return the actor and the question of a request, which are the last line of its prompt."""
    text = tokenizer.decode(list(request.prompt_token_ids))
    return text[text.index("<") + 1 : text.index(">")].split()


class Said(MultiTurnEpisode):
    """Both actors answer a question once; reward functions get what they said as ``said``."""

    episode_type = "said"
    actors = ACTORS
    max_turns = 1

    def __init__(self, functions, weights):
        super().__init__()
        self.rubric = Rubric(functions, weights)

    def setup(self, state, arena, artifact):
        state.data["said"] = {}

    def build_messages(self, state, arena, artifact):
        return [{"role": "user", "content": f"<{state.current_actor} {artifact}>"}]

    def env_response(self, state, arena, artifact):
        state.data["said"][state.current_actor] = state.last_completion_text

    def get_extras(self, state):
        return dict(state.data)


@pytest.fixture
def played(tmp_path, small_model):
    """Train ``steps`` steps on what ``says(actor, question, step, attempt)`` answers to 6 questions, 4 times each, and
    return the diagnoser of the run and its metrics."""

    runs = []

    async def played(says, functions, weights=None, steps=5, success="won/first", tools=(), sharpness=1, **changes):
        runs.append(tmp_path / f"run{len(runs)}")
        (model, _), tokenizer = small_model(layers=1), ByteTokenizer()
        model.get_output_embeddings().weight.data.mul_(sharpness)
        counts = {}

        def script(request):
            step = client.version("default") + 1
            actor, question = words(request, tokenizer)
            key = step, actor, question
            counts[key] = counts.get(key, -1) + 1
            return says(actor, int(question), step, counts[key] % 4)

        client = ScriptedClient(script, tokenizer=tokenizer)
        config = config_from_dict(
            {
                "run_dir": str(runs[-1]),
                "steps": steps,
                "update": {"lr": 1e-6, "old_logprobs": "recompute"},
                "policies": {"default": {}},
                **changes,
            }
        )
        sampling = Sampling(max_tokens=8 if not tools else 40)
        # Rows without an advantage stay, so that each step trains and the script goes on.
        arena = Arena(
            client,
            tokenizer,
            credit=DrMASCredit(),
            sampling=sampling,
            filters=Filters(drop_zero_advantage=False),
            seed=0,
        )
        for actor in ACTORS:
            arena.add_actor(Actor(actor, tools=tools))
        arena.add_episode(Said(functions, weights))
        arena.source = lambda: [
            EpisodeRequest("said", question, group_id=question) for question in range(6) for _ in range(4)
        ]
        policies = {"default": Policy("default", model, config.update, total_steps=100)}
        questions = EvalSet([EpisodeRequest("said", 0)], success)
        trainer = Trainer(arena, policies, config, validation=questions)
        await trainer.run()
        warnings = read_metrics(config.run_dir, "warnings.jsonl")
        again = diagnose(config.run_dir)
        told = [(row["step"], row["diagnosis"], row["actor"]) for row in warnings if "diagnosis" in row]
        assert told == [(each.step, each.name, each.actor) for each in again.found], "afterwards it says the same"
        assert [row["warning"] for row in warnings if "diagnosis" in row] == [each.line for each in again.found]
        return again, read_metrics(config.run_dir)

    return played


def names(diagnoser):
    return {(each.name, each.actor) for each in diagnoser.found}


def names_of(diagnoser):
    return sorted({each.name for each in diagnoser.found})


def won(extras):
    return {actor: float(text == "1") for actor, text in extras["said"].items()}


def any_digit(actor, question, step, attempt):
    return str((question + attempt) % 10)


def differ(extras):
    """Pay the second actor so that its groups never tie."""
    return {"second": float(extras["said"]["second"])}


async def test_groups_tie_for_four_reasons(played):
    """The first actor's reason depends on the run, the second's groups never tie."""

    def says_one(actor, question, step, attempt):
        return str(question if actor == "first" else question + attempt)

    cases = {
        "all attempts fail": (lambda artifact: 0.0, any_digit),
        "all attempts succeed": (lambda artifact: 1.0, any_digit),
        "all attempts wrote the same": (lambda artifact: 0.0, says_one),
        "different answers got one reward": (lambda artifact: 0.5, any_digit),
    }
    for text, (value, says) in cases.items():

        def won(artifact, value=value):
            return {"first": value(artifact)}

        found, _ = await played(says, [won, differ])
        ((name, actor),) = names(found)
        assert (name, actor) == ("ties", "first") and text in found.found[0].text
        assert (found.found[0].since, found.found[0].step) == (1, 3)
        assert "100% of its groups tie" in found.found[0].line and "docs/diagnosis.md#ties" in found.found[0].line


async def test_one_answer_to_different_prompts_since_its_step(played):
    def says(actor, question, step, attempt):
        return "0" if actor == "second" and step > 3 else any_digit(actor, question, step, attempt)

    found, rows = await played(says, [won], steps=12, success="won/first")
    (each,) = [each for each in found.found if each.name == "one-answer"]
    assert each.actor == "second" and each.since > 3 and f"since step {each.since}. Go back" in each.line
    assert "of its answers to 6 different prompts are the same" in each.text and "entropy" in each.text
    assert "rollout.branches" not in each.remedy, "each group has one prompt"
    assert rows[-1]["answers/distinct/second"] == 1 and rows[-1]["answers/distinct/first"] == 9


@pytest.mark.parametrize("sharpness", [1, 1000])
async def test_a_start_that_is_too_sharp_to_explore(played, sharpness):
    """With the same answers, a start with an entropy has only tied groups; a sharp one has the cause of these."""

    def says(actor, question, step, attempt):
        return str(question if actor == "first" else question + attempt)

    def none(extras):
        return {"first": 0.0}

    found, rows = await played(says, [none, differ], sharpness=sharpness, success="none/first")
    assert (rows[0]["default/first/entropy"] < 0.05) == (sharpness > 1)
    assert names(found) == {("sharp-start" if sharpness > 1 else "ties", "first")}
    assert "all attempts wrote the same" in found.found[0].text


@pytest.mark.parametrize(("answer", "is_told"), [("1", True), ("2", False)])
async def test_a_start_that_leaves_nothing_to_gain(played, tmp_path, answer, is_told):
    """It is said at the first validation, though samples of the first actor fail now and then."""

    def says(actor, question, step, attempt):
        return answer if actor == "first" and attempt < 3 else any_digit(actor, question, step, attempt)

    await played(says, [won, differ], steps=1, eval={"every": 1})
    told = [row for row in read_metrics(tmp_path / "run0", "warnings.jsonl") if "already succeeds in" in row["warning"]]
    assert [row["step"] for row in told] == [0] * is_told


async def test_form_is_learned_and_the_outcome_is_not(played):
    def form(extras):
        return {actor: float(text != "9") for actor, text in extras["said"].items()}

    def says(actor, question, step, attempt):
        return "9" if step < 6 and attempt < 2 else "1" if attempt == 3 else str(2 + (question + attempt) % 3)

    found, _ = await played(says, [form, won], [0.25, 1.0], steps=26)
    assert names(found) == {("form-alone", "first"), ("form-alone", "second")}
    assert "it learned form (50% to 100%" in found.found[0].text and "not the outcome (success 25% to 25%)" in (
        found.found[0].text
    )


async def test_the_team_learns_around_an_actor(played):
    def own(extras):
        return won(extras)

    def team(extras):
        return float(extras["said"]["second"] == "1")

    def says(actor, question, step, attempt):
        right = (question * 4 + attempt) * 5 % 24 < (2 * step if actor == "second" else 24 - 2 * step)
        return "1" if right else str(2 + question)

    found, _ = await played(says, [own, team], steps=11, success="team/first")
    assert names(found) == {("own-part-falls", "first")}


async def test_a_verdict_that_is_nearly_always_right(played):
    """In the first run five of six answers are wrong, so 'no' pays, whatever the checker sees; then half of them."""

    def verdict_if(is_right):
        def verdict(extras, artifact):
            return {"second": float((extras["said"]["second"] == "no") != is_right(artifact))}

        return verdict

    def says(actor, question, step, attempt):
        return any_digit(actor, question, step, attempt) if actor == "first" else "no" if attempt else "yes"

    for is_right, base, told in ((lambda n: n == 0, 5 / 6, True), (lambda n: n % 2 == 0, 1 / 2, False)):
        found, rows = await played(says, [verdict_if(is_right), won], success="won/first")
        assert names(found) == ({("lopsided-verdict", "second")} if told else set())
        assert rows[0]["verdicts/base_rate/verdict/second"] == pytest.approx(base)
        assert rows[0]["verdicts/skill/verdict/second"] == pytest.approx(0)


async def test_a_game_ends_without_a_payoff(played):
    """They trade at a price in half of the first episodes, and never after the fourth step."""

    def gain(extras, artifact):
        deal = extras["said"]["second"] == "1"
        return {"first": 0.25 * deal * (1 + artifact % 2), "second": 1.0 * deal}

    def says(actor, question, step, attempt):
        return str(attempt % 2 if step < 5 else 2 + (question + attempt) % 8)

    found, _ = await played(says, [gain], steps=12, success="gain/second")
    assert names(found) == {("no-payoff", None), ("fell", None)}
    each = next(each for each in found.found if each.name == "no-payoff")
    assert each.since > 4 and "end without a payoff to anyone, at the start 50%" in each.text


async def test_answers_that_their_limit_cuts(played):
    def says(actor, question, step, attempt):
        return any_digit(actor, question, step, attempt) * (9 if actor == "first" else 1)

    def won(extras):
        return {"first": 0.0}

    found, _ = await played(says, [won, differ])
    (each,) = found.found
    assert (each.name, each.actor) == ("cut-answers", "first")
    assert "100% of its answers end at their token limit" in each.text and "rollout.max_tokens" in each.remedy


def test_calls_that_the_limit_cuts():
    diagnoser = Diagnoser(Facts({"first": "default"}))
    for step in range(1, 6):
        diagnoser.add({"step": step, "cut_calls/first": 0.25, "cut_calls/frozen": 1.0})
    assert names(diagnoser) == {("cut-answers", "first")} and "in 25% of its answers" in diagnoser.found[0].text


async def test_calls_of_tools_that_are_not_read(played):
    def double(x: int) -> int:
        """Double a number.

        Args:
            x: the number
        """
        return 2 * x

    def says(actor, question, step, attempt):
        return "<tool_call>{</tool_call>" if actor == "first" and attempt % 2 else str(question + attempt)

    found, _ = await played(says, [won, differ], tools=[double], success="won/first")
    assert ("unread-calls", "first") in names(found), found.found


async def test_a_rate_that_moves_the_policy_too_far(make_trainer):
    trainer = make_trainer(steps=5, update={"lr": 0.05, "num_minibatches": 4, "ppo_epochs": 4})
    await trainer.run()
    found = diagnose(trainer.config.run_dir)
    assert ("far-steps", None) in names(found)
    # Earlier versions named the metrics of the only policy without it.
    rows = [{k.removeprefix("default/"): v for k, v in row.items()} for row in read_metrics(trainer.config.run_dir)]
    for facts in (found.history.facts, None):
        again = Diagnoser(facts)
        assert ("far-steps", None) in {(each.name, each.actor) for row in rows for each in again.add(row)}


def test_a_first_step_that_took_the_entropy_away():
    """SmolLM2 as buyer and seller, with one update per step, so that no KL divergence shows how far it goes."""
    facts, *rows = map(json.loads, (Path(__file__).parent / "ill" / "haggle.jsonl").read_text().splitlines())
    diagnoser = Diagnoser(Facts.from_json(json.dumps(facts)))
    (far,) = [found for row in rows for found in diagnoser.add(row) if found.name == "far-steps"]
    assert (far.actor, far.since, far.step) == ("seller", 2, 4)
    assert "one step took its entropy from 1.5 to 0.029 nats per token (default/seller/entropy)" in far.text
    (alike,) = [found for found in diagnoser.found if found.name == "one-answer"]
    assert alike.actor == "seller" and "Its 40 prompts are compared in 7 groups" in alike.line
    assert "Its start has this habit (61% in the first step)" in alike.line
    recovered = Diagnoser(Facts.from_json(json.dumps(facts)))
    assert not any(recovered.add({**row, "default/seller/entropy": 1.0 + row["step"] % 2}) for row in rows[:4])


def test_an_actor_that_settles_before_the_team_gets_better():
    """SmolLM2 as a clerk who writes two prices down, and a cashier who adds what the clerk wrote."""
    facts, *rows = map(json.loads, (Path(__file__).parent / "ill" / "till.jsonl").read_text().splitlines())
    diagnoser = Diagnoser(Facts.from_json(json.dumps(facts)))
    (alike,) = [found for row in rows for found in diagnoser.add(row)]
    assert (alike.name, alike.actor) == ("narrows", "clerk")
    assert re.search(r"entropy fell from 0.3 to 0.1\d* .*% of its groups tie \(at the start 46%\)", alike.text)
    better = Diagnoser(Facts.from_json(json.dumps(facts)))
    assert not any(better.add({**row, "success": min(1.0, row["success"] + row["step"] / 50)}) for row in rows)


def test_a_resumed_run_says_what_one_left_alone_says(tmp_path, monkeypatch):
    """Wherever it was stopped. Of a long run it reads the numbers, and diagnoses the latest steps alone."""
    facts = Facts({"first": "default"}, success="solved/first")
    monkeypatch.setattr(begun, "facts_of", lambda trainer: facts)
    counted = []
    monkeypatch.setitem(DIAGNOSES, "ties", lambda history: counted.append(1) or [])

    def row(step):
        success = 0.1 if step < 4 or step >= 30 else 0.8
        same = 0.98 if step >= 12 else 0.3
        answers = {"prompts": 8.0, "distinct": 8.0, "commonest": same}
        return {"step": step, "success": success} | {f"answers/{name}/first": value for name, value in answers.items()}

    rows = [row(step) for step in range(1, 61)]
    alone = Diagnoser(facts)
    said = {found.line: found for each in rows for found in alone.add(each)}
    assert [found.name for found in said.values()] == ["one-answer", "fell"]
    for stop in range(1, 60):
        log = RunLog(tmp_path / str(stop), 60)
        for each in rows[:stop]:
            log.step(each["step"], {name: value for name, value in each.items() if name != "step"})
        for found in said.values():
            if found.step <= stop:
                log.warn(found.step, found.line, diagnosis=found.name, actor=found.actor)
        counted.clear()
        view = SimpleNamespace(log=log, config=SimpleNamespace(run_dir=log.folder))
        resumed = begun.begin(view, stop)
        assert len(counted) <= 8
        later = [found.line for each in rows[stop:] for found in resumed.add(each)]
        assert later == [line for line, found in said.items() if found.step > stop], stop


@pytest.mark.parametrize("table", TABLES, ids=[table.stem for table in TABLES])
def test_nothing_is_said_of_healthy_runs(table):
    rows = [json.loads(line) for line in table.read_text().splitlines()]
    diagnoser = Diagnoser(Facts.from_json(json.dumps(rows[0])))
    for row in rows[1:]:
        assert diagnoser.add(row) == [], row["step"]
    assert len(rows) > 8


RESULTS = Path(__file__).parents[3] / "bench" / "learning" / "results"
ILL = {
    "real/views/half-view/0": "form-alone",
    "real/views/half-view/1": "form-alone",
    "real/views/half-view/2": "form-alone",
    "real/views/own-teacher/0": "form-alone",
    "rae/kuhn_poker-3x/rae/2": "cut-answers",
    "rae/kuhn_poker-3x/shared/1": "cut-answers",
}
"""Rows of the learning table that fell ill: half a view can't learn more than the form, games whose answers grew."""


def test_the_learning_table_has_no_other_illness():
    """Its rows have some metrics of each step: reward functions, entropy, and the share of cut answers."""
    told = {}
    for path in RESULTS.glob("*.jsonl"):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            if diagnoser := diagnosed_row(row):
                told |= dict.fromkeys([row["cell"]] * bool(diagnoser.found), ", ".join(names_of(diagnoser)))
    assert told == ILL


def test_starts_that_learned_had_an_entropy_in_the_documented_range():
    rows = [json.loads(line) for path in RESULTS.glob("*.jsonl") for line in path.read_text().splitlines()]
    learned = [row for row in rows if row.get("curve") and row["success"] - row["curve"][0][1] >= 0.1]
    starts = [row["series"]["entropy"][0][1] for row in learned if row["series"].get("entropy")]
    low, high = EXPLORES
    assert len(starts) > 100 and sum(low <= start <= high for start in starts) >= 0.97 * len(starts)


def diagnosed_row(row):
    rewards, series = row.get("rewards") or {}, row.get("series", {})
    names = [name for name in rewards if name.partition("/")[0] in ("right", "outcome", "solved")]
    goal = row["config"].get("task_options", {}).get("success_metric") or next(iter(names), None)
    actors = {name.rpartition("/")[2] for name in rewards} or {"agent"}
    steps = {}
    for name, values in rewards.items():
        for step, value in enumerate(values, 1):
            steps.setdefault(step, {})[f"metric/{name}"] = value
            if name == goal:
                steps[step]["success"] = value
    for name in ("entropy", "truncated"):
        for step, value in series.get(name, ()):
            pattern = "truncated/{}" if name == "truncated" else "default/{}/entropy"
            steps.setdefault(step, {}).update({pattern.format(each): value for each in actors})
    diagnoser = Diagnoser(Facts(dict.fromkeys(actors, "default"), success=goal))
    for step in sorted(steps):
        diagnoser.add({"step": step, **steps[step]})
    return diagnoser


def test_every_diagnosis_has_its_heading_in_the_docs():
    page = (Path(__file__).parents[3] / "docs" / "diagnosis.md").read_text()
    assert [name for name in DIAGNOSES if f"\n## {name}\n" not in page] == []
