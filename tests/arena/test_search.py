"""Beam search and trees without selection, held against a plain simulation on random games."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections import Counter, defaultdict
from dataclasses import dataclass, field

import pytest

from turnwise.arena import LeakError, MultiTurnEpisode, Rubric, TreeSampler, private
from turnwise.arena.rewards.rubric import DropRolloutError
from turnwise.credit import ATGRPOCredit, GRPOCredit
from turnwise.samples.collect import collect_samples
from turnwise.state import PrunedError, to_python
from turnwise.types import EpisodeRequest, ModelError

from .helpers import run
from .replaying import play as play_again
from .replaying import record
from .test_episode_checkpoints import game
from .test_sampler import Count, by_node, grown


def digit(*parts) -> int:
    return hashlib.blake2b(repr(parts).encode(), digest_size=1).digest()[0]


@dataclass
class Rules:
    """One random game: who skips when, when it is over, which calls fail, and how it is sampled."""

    seed: int
    actors: tuple[str, ...]
    max_turns: int
    branches: dict[str, int]
    beam_width: int
    select: str
    score_by: str
    failing: int

    @classmethod
    def draw(cls, seed: int) -> Rules:
        rng = random.Random(seed)
        actors = ("a", "b", "c")[: rng.randint(1, 3)]
        select = rng.choice(["best", "best", "best", "first", "none"])
        return cls(
            seed,
            actors,
            max_turns=rng.randint(1, 3),
            branches={actor: rng.choice([1, 2, 3, 4]) for actor in actors} | {actors[0]: rng.choice([2, 3, 4])},
            beam_width=1 if select == "none" else rng.randint(1, 4),
            select=select,
            score_by="reward" if select == "none" else rng.choice(["reward", "return"]),
            failing=rng.choice([0, 0, 9, 3]),
        )

    def skips(self, log, actor, turn) -> bool:
        return digit(self.seed, "skip", log, actor, turn) % 8 == 0

    def is_over(self, log) -> bool:
        return digit(self.seed, "over", log) % 6 == 0

    def answer(self, prompt, number):
        said = digit(self.seed, prompt, number)
        return None if self.failing and said % self.failing == 0 else str(said % 7)

    def sampler(self) -> TreeSampler:
        return TreeSampler(self.branches, self.select, beam_width=self.beam_width, score_by=self.score_by)


class RandomGame(MultiTurnEpisode):
    """The state is the list of moves; a move is a digit, which is its reward; the prompt is the list."""

    episode_type = "random"
    rubric = Rubric([lambda extras: float(len(extras["log"]))])

    def __init__(self, rules: Rules) -> None:
        super().__init__(sampler=rules.sampler(), max_turns=rules.max_turns)
        self.rules, self.actors = rules, rules.actors

    def setup(self, state, arena, artifact):
        state.data = {"log": []}

    def build_messages(self, state, arena, artifact):
        log = to_python(state.data["log"])
        if self.rules.skips(log, state.current_actor, state.turn):
            return None
        return prompt_of(log, state.current_actor)

    def env_response(self, state, arena, artifact):
        state.data["log"].append(int(state.last_completion_text))

    def step_reward(self, state, arena, artifact):
        return float(state.last_completion_text)

    def is_done(self, state, arena, artifact):
        return self.rules.is_over(to_python(state.data["log"]))

    def get_extras(self, state):
        return {"log": state.data["log"]}


def prompt_of(log, actor) -> str:
    return f"{actor} after {log}"


@dataclass
class Way:
    """A beam of the simulation."""

    log: list[int] = field(default_factory=list)
    turn: int = 0
    acted: tuple[str, ...] = ()
    actor: str = ""
    score: float = 0.0
    earned: float = 0.0
    branched: bool = False
    ended: bool = False


def simulate(rules: Rules):
    """``(asked [(prompt, answer)], logs of the ends, the own one first; None where all failed)``."""
    ways, asked, numbers = [Way(actor=rules.actors[0])], [], Counter()
    while any(not way.ended for way in ways):
        kept, found = [], []
        for place, way in enumerate(ways):
            if way.ended or rules.skips(way.log, way.actor, way.turn):
                kept.append((way, True))
                continue
            count = 1 if rules.select == "none" and way.branched else rules.branches[way.actor]
            for number in range(count):
                prompt = prompt_of(way.log, way.actor)
                said = rules.answer(prompt, numbers[prompt])
                numbers[prompt] += 1
                asked.append((prompt, said))
                if said is None:
                    continue
                earned = way.earned + int(said)
                score = earned if rules.score_by == "return" else float(said)
                log = [*way.log, int(said)]
                child = Way(log, way.turn, way.acted, way.actor, score, earned, way.branched or count > 1)
                if count == 1:
                    kept.append((child, False))
                else:
                    found.append((number, place, child))
        found.sort(key=lambda one: one[:2])
        chosen = []
        while found and (rules.select == "none" or len(kept) + len(chosen) < rules.beam_width):
            best = 0 if rules.select != "best" else max(range(len(found)), key=lambda i: (found[i][2].score, -i))
            _, place, way = found.pop(best)
            chosen.append((way, False))
            if rules.select != "none":
                found = [one for one in found if one[1] != place or one[2].log != way.log]
        ways = []
        for way, skipped in kept + chosen:
            ways.append(way)
            if way.ended:
                continue
            way.acted = (*way.acted, way.actor)
            if not skipped and rules.is_over(way.log):
                way.ended = True
                continue
            way.actor = rules.actors[(rules.actors.index(way.actor) + 1) % len(rules.actors)]
            if way.actor in way.acted:
                way.turn, way.acted = way.turn + 1, ()
            way.ended = way.turn >= rules.max_turns
        if not ways:
            return asked, None
    own = 0 if rules.select != "best" else max(range(len(ways)), key=lambda i: (ways[i].score, -i))
    return asked, [ways[own].log, *(way.log for place, way in enumerate(ways) if place != own)]


def play_rules(make_arena, rules: Rules, **options):
    numbers: Counter[str] = Counter()

    def reply(prompt, request):
        text = prompt.removeprefix("<user>").removesuffix("\n<assistant>")
        numbers[text] += 1
        return rules.answer(text, numbers[text] - 1) or ModelError("gone")

    arena = make_arena(reply, actors=("a", "b", "c"), failure_threshold=1.0, **options, episodes=[RandomGame(rules)])
    [result] = run(arena, EpisodeRequest("random", "q"))
    return arena, result


def ways_of(rollout):
    """The moves of each end, the episode's own first, by the origins of the recorded steps alone."""
    at = {(step.tree_node, step.branch): step for step in rollout.steps if step.tree_node is not None}
    after = defaultdict(list)
    for step in rollout.steps:
        if step.tree_node is None and step.facts.error is None:
            after[step.from_branch].append(int(step.completion))

    def way(from_branch):
        if from_branch is None:
            return after[None]
        return [*way(at[from_branch].from_branch), int(at[from_branch].completion), *after[from_branch]]

    ends = [tuple(end["from_branch"]) for end in rollout.meta["ends"]]
    own = rollout.facts.own_end or 0
    return [way(ends[own]), *(way(from_branch) for place, from_branch in enumerate(ends) if place != own)]


@pytest.mark.parametrize("block", range(5))
def test_random_trees_are_what_a_plain_simulation_gives(make_arena, block):
    for seed in range(40 * block, 40 * block + 40):
        rules = Rules.draw(seed)
        told = f"{rules}"
        arena, result = play_rules(make_arena, rules)
        rollout = result.rollout
        asked, ends = simulate(rules)
        prompts = Counter("<user>" + prompt + "\n<assistant>" for prompt, _ in asked)
        assert Counter(arena.client.prompts) == prompts, told
        assert len(rollout.steps) == sum(said is not None for _, said in asked), told
        if ends is None:
            assert "gone" in rollout.error, told
            continue
        assert rollout.error is None, rollout.error
        assert rollout.extras["log"] == ends[0], told
        if "ends" in rollout.meta:
            assert ways_of(rollout) == ends, told
            assert [end["rewards"] for end in rollout.meta["ends"]] == [
                dict.fromkeys(actors, float(len(log))) for actors, log in _actors_and_logs(rollout)
            ], told
        else:
            assert len(ends) == 1, told
        _check_records(arena, result, rules)


def _actors_and_logs(rollout):
    for number, end in enumerate(rollout.meta["ends"]):
        steps = [step for step in rollout.steps if number in step.info.get("ends", ())]
        assert tuple(end["from_branch"]) in {(step.tree_node, step.branch) for step in steps}
        yield list(dict.fromkeys(step.actor_id for step in steps)), [int(step.completion) for step in steps]


def _check_records(arena, result, rules):
    """Groups have one prompt each, and nothing trains twice or was not sampled."""
    rollout = result.rollout
    nodes = [node for node in by_node(rollout) if node[0].tree_node is not None]
    for node in nodes:
        assert len({tuple(step.prompt_token_ids) for step in node}) == 1, rules
        assert len({(step.actor_id, step.turn, step.from_branch) for step in node}) == 1, rules
        assert len({step.branch for step in node}) == len(node) <= rules.branches[node[0].actor_id], rules
    assert len({node[0].from_branch for node in nodes}) == len(nodes), "each survivor has one node at most"
    seeds = [step.facts.seed for step in rollout.steps]
    assert len(set(seeds)) == len(seeds), rules
    arena.credit = ATGRPOCredit()
    batch = arena.assign_credit_and_pack([result])
    assert len(batch) + sum(batch.dropped.values()) == len(rollout.steps), rules
    for node in nodes:
        kept = [step for step in node if step.trainable]
        assert sum(step.advantage for step in kept) == pytest.approx(0, abs=1e-4), rules


# ---------------------------------------------------------------------------------------------------------------------
# Single points
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_selector_of_ones_own_is_asked_among_those_left(make_arena, seed):
    asked = []

    def second_best(steps, rng):
        asked.append([step.reward for step in steps])
        order = sorted(range(len(steps)), key=lambda place: -steps[place].reward)
        return order[min(1, len(order) - 1)]

    sampler = TreeSampler(4, second_best, beam_width=2)
    _, [result] = grown(make_arena, Count(sampler=sampler, max_turns=1), "q", seed=seed)
    assert len(asked[0]) == 4 > len(asked[1])
    assert len(asked[-1]) == len(result.rollout.meta["ends"]) == 2, "at the end it is asked for the episode's own"
    wrong = Count(sampler=TreeSampler(2, lambda steps, rng: 2))
    _, [failed] = grown(make_arena, wrong, "q", failure_threshold=1.0)
    assert "select gave branch 2: expected an index below 2" in failed.rollout.error


def test_softmax_draws_without_replacement(make_arena):
    sampler = TreeSampler(5, "sample", temperature=1e9, beam_width=2)
    went_on = Counter()
    for seed in range(40):
        _, [result] = grown(make_arena, Count(sampler=sampler, max_turns=1), "q", seed=seed)
        nodes = by_node(result.rollout)
        went_on.update({node[0].from_branch[1] for node in nodes[1:]})
        assert len({node[0].from_branch for node in nodes[1:]}) == len(nodes) - 1
    assert set(went_on) == set(range(5)) and max(went_on.values()) < 30, went_on


def test_a_way_without_an_end_does_not_train_where_only_the_end_pays(make_arena):
    def reply(prompt, request):
        return ModelError("down") if "a9" in prompt or "a8" in prompt else str((request.sampling.seed or 0) % 10)

    for seed in range(30):
        episode = Outcome(sampler=TreeSampler(6, "none"), max_turns=1)
        arena, [result] = grown(make_arena, episode, "q", reply=reply, seed=seed)
        if (lost := result.rollout.metrics.get("tree/lost_beams", 0)) > 0:
            steps = result.rollout.steps
            assert [step.completion in "89" for step in steps[:6]] == [not step.trainable for step in steps[:6]]
            assert len(steps) == 12 - lost and all("down" in step.facts.error for step in steps if not step.trainable)
            assert len(arena.assign_credit_and_pack([result])) == 12 - 2 * lost
            return
    raise AssertionError("no seed lost a way")


def test_the_data_of_all_ends_but_the_own_one_is_freed(make_arena):
    states = []

    class Watched(Count):
        def is_done(self, state, arena, artifact):
            states.append(state.data)
            return False

    _, [result] = grown(make_arena, Watched(sampler=TreeSampler(5, beam_width=3), max_turns=1), "q", seed=4)
    assert len(result.rollout.meta["ends"]) == 3
    kept = []
    for data in states:
        try:
            kept.append(list(data["log"]))
        except PrunedError:
            continue
    assert [log for log in kept if len(log) == 2] == [result.rollout.extras["log"]], "of two moves, as the ends are"


class Outcome(Count):
    """Scored at its end alone: the last digit that "b" wrote."""

    rubric = Rubric([lambda extras: {"a": float(extras["log"][-1][1]), "b": float(extras["log"][-1][1])}])

    def step_reward(self, state, arena, artifact):
        return None


@pytest.mark.parametrize("seed", [0, 1])
def test_without_selection_each_branch_is_a_trajectory_with_a_reward_of_its_own(make_arena, seed):
    episode = Outcome(sampler=TreeSampler(4, "none"))
    arena, [result] = grown(make_arena, episode, "q", credit=GRPOCredit(), seed=seed)
    rollout = result.rollout
    assert len(rollout.steps) == 16 and all(step.selected for step in rollout.steps)
    ends = rollout.meta["ends"]
    earned = [end["rewards"]["a"] for end in ends]
    for number, end in enumerate(ends):
        way = [step for step in rollout.steps if step.info["ends"] == [number]]
        assert [step.actor_id for step in way] == ["a", "b", "a", "b"]
        assert end["rewards"] == dict.fromkeys("ab", float(way[-1].completion))
    assert rollout.rewards["a"] == pytest.approx(sum(earned) / 4)
    plain_arena, plain = grown(make_arena, Outcome(), *["q"] * 4, credit=GRPOCredit(), seed=seed)
    for one, rewards in zip(plain, earned, strict=True):
        one.rollout.rewards = dict.fromkeys("ab", rewards)
    arena.assign_credit([result])
    plain_arena.assign_credit(plain)
    for number, one in enumerate(plain):
        way = [step.advantage for step in rollout.steps if step.info["ends"] == [number]]
        assert way == pytest.approx([step.advantage for step in one.rollout.steps]), "as four copies of the question"


def test_without_selection_a_shared_beginning_is_sampled_once(make_arena):
    late = TreeSampler(3, "none", branch_at=lambda state: state.turn == 1)
    arena, [result] = grown(make_arena, Outcome(sampler=late), "q")
    steps = result.rollout.steps
    assert [step.info["ends"] for step in steps[:2]] == [[0, 1, 2]] * 2 and len(steps) == 2 + 6
    assert len(arena.client.requests) == 8
    [first] = [sample for sample in collect_samples([result]) if sample.step_index == 0]
    assert first.reward == result.rollout.rewards["a"], "the mean of what its branches earned"


def test_an_end_that_the_rubric_drops_does_not_train(make_arena):
    def no_odd_ends(extras):
        if int(extras["log"][-1][1]) % 2:
            raise DropRolloutError("odd")
        return 1.0

    class Dropping(Outcome):
        rubric = Rubric([no_odd_ends])

    for seed in range(20):
        arena, [result] = grown(make_arena, Dropping(sampler=TreeSampler(4, "none"), max_turns=1), "q", seed=seed)
        dropped = [end["dropped"] is not None for end in result.rollout.meta["ends"]]
        assert len(arena.assign_credit_and_pack([result])) == 2 * dropped.count(False)
        if 0 < sum(dropped) < 4:
            assert result.rollout.rewards == {"a": 1.0, "b": 1.0}
            return
    raise AssertionError("no seed dropped some")


def test_group_functions_and_several_ends_do_not_go_together(make_arena):
    class Grouped(Count):
        rubric = Rubric([lambda rollouts: [1.0] * len(rollouts)])

    for options in ({"beam_width": 2}, {"select": "none"}):
        episode = Grouped(sampler=TreeSampler(3, **options))
        _, [result] = grown(make_arena, episode, "q", failure_threshold=1.0)
        assert "Request copies of the question instead" in result.rollout.error


class Secretive(Count):
    """What "a" writes is its secret; what it did not write everybody hears of."""

    leaky = False

    def env_response(self, state, arena, artifact):
        super().env_response(state, arena, artifact)
        if state.current_actor == "a":
            own = int(state.last_completion_text)
            state.data["heard"] = f"The number {own if self.leaky else 9 - own} is not the one."
            private(f"The number {own} is not the one.", to="a")
        return ""

    def build_messages(self, state, arena, artifact):
        return [{"role": "user", "content": state.data.get("heard", "Go.") if state.current_actor == "b" else "Go."}]


@pytest.mark.parametrize("options", [{"beam_width": 3}, {"select": "none"}, {"playouts": 2}])
def test_a_secret_of_one_way_may_be_open_on_another(make_arena, options):
    for seed in range(6):
        episode = Secretive(sampler=TreeSampler(6, **options), max_turns=1)
        arena, [result] = grown(make_arena, episode, "q", seed=seed, check_private=True)
        assert result.rollout.error is None
        arena.assign_credit([result])
        arena.build_training_batch([result])
    episode.leaky = True
    with pytest.raises(LeakError, match="actor 'b' holds what is private to 'a'"):
        run(arena, EpisodeRequest("count", "q"))


def test_a_leak_that_is_known_too_late_shows_in_pruned_branches_too(make_arena):
    class Late(Secretive):
        def env_response(self, state, arena, artifact):
            if state.current_actor == "b" and state.last_completion_text in "0123":
                private(state.data["heard"], to="a")
            return super().env_response(state, arena, artifact)

    episode = Late(sampler=TreeSampler({"b": 8}, beam_width=2), max_turns=1)
    arena = make_arena(actors=("a", "b"), check_private=True, episodes=[episode])
    with pytest.raises(LeakError, match="actor 'b' holds what is private to 'a'"):
        run(arena, *(EpisodeRequest("count", f"q{number}") for number in range(4)))


@pytest.mark.parametrize("options", [{"beam_width": 3}, {"select": "none"}, {"playouts": 2}])
def test_evaluation_is_never_a_tree_and_one_slot_is_enough(make_arena, options):
    arena = make_arena(actors=("a", "b"), max_concurrency=1, episodes=[Count(sampler=TreeSampler(4, **options))])
    [result] = asyncio.run(arena.evaluation().generate_rollouts([EpisodeRequest("count", "q")]))
    assert len(arena.client.requests) == 4 and "ends" not in result.rollout.meta
    [trained] = run(arena, EpisodeRequest("count", "q"))
    assert trained.rollout.error is None and arena.client.peak == 1


def test_branches_of_all_beams_generate_in_parallel(make_arena):
    arena, _ = grown(make_arena, Count(sampler=TreeSampler(4, beam_width=3)), "q")
    assert arena.client.peak == 12


def test_a_deadline_ends_all_beams_and_shows_what_was_sampled(make_arena):
    calls = iter(range(1000))

    async def reply(prompt, request):
        if next(calls) > 8:
            await asyncio.sleep(60)
        return str((request.sampling.seed or 0) % 10)

    arena = make_arena(reply, actors=("a", "b"), failure_threshold=1.0)
    arena.add_episode(Count(sampler=TreeSampler(4, beam_width=2)))
    [result] = run(arena, EpisodeRequest("count", "q", timeout=0.2))
    assert "ran past its deadline" in result.rollout.error
    assert len(result.rollout.steps) == 9 and arena.budget.in_use == 0


TREES = [{"beam_width": 2}, {"beam_width": 5, "select": "sample"}, {"select": "none"}, {"playouts": 2}]


@pytest.mark.parametrize("options", TREES)
def test_a_recorded_tree_is_played_again(make_arena, options):
    def new():
        arena = game(make_arena)
        arena.episodes["game"].sampler = TreeSampler(3, **options)
        return arena

    [row] = record(new(), [EpisodeRequest("game", "q0")])
    result, divergence, _ = play_again(new(), row)
    assert divergence is None and result is not None, str(divergence)
    assert [step.selected for step in result.rollout.steps] == [step["selected"] for step in row["steps"]]
