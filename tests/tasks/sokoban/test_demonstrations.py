from __future__ import annotations

import re
from collections import Counter
from random import Random

import pytest

from turnwise.tasks.routes import parse_route
from turnwise.tasks.sokoban.demonstrations import blind_route, decide, demonstrations, suggest
from turnwise.tasks.sokoban.level import distances, draw_levels, is_solved, moved, parse_level, shortest_route, walk
from turnwise.tasks.sokoban.prompts import read_messages

LEVELS = draw_levels("train", 400, 0)
TEAM = ("tool", "planner")


def solves(level, route):
    states = walk(level, level.start, route).states
    return bool(states) and is_solved(level, states[-1])


@pytest.mark.parametrize("quality", [0.0, 0.4, 1.0])
def test_quality_is_the_chance_of_a_solution(quality):
    right = {"tool": [], "planner": []}
    blind = sum(solves(level, blind_route(level)) for level in LEVELS) / len(LEVELS)  # by luck
    for actor, messages, text in demonstrations(LEVELS, TEAM, 1, quality):
        level, suggestion = read_messages(messages)
        route = parse_route(text)
        assert route and (suggestion is None or actor == "planner")
        right[actor].append(solves(level, route))
    assert {len(share) for share in right.values()} == {200}
    assert sum(right["tool"]) / 200 == pytest.approx(quality + (1 - quality) * blind, abs=0.1)
    # A planner mends what did not solve, or starts by itself.
    assert sum(right["planner"]) >= sum(right["tool"]) - 20


def test_the_first_demonstrations_are_clean():
    made = demonstrations(LEVELS, TEAM, 1, 0.0, clean=0.5)
    right = [solves(read_messages(m)[0], parse_route(text)) for _, m, text in made]
    assert all(right[:200]) and sum(right[200:]) < 120


def test_some_follow_a_failed_round():
    later = elsewhere = stopped = 0
    for drawn, (_, messages, text) in zip(LEVELS, demonstrations(LEVELS, TEAM, 1), strict=True):
        level, _ = read_messages(messages)
        assert level.goals == drawn.goals and level.start in distances(level)
        told = re.search(
            r"Round [23]\. Walked: (?:no moves read|\d+ moves?(?:, then ([UDLR]) is blocked)?)\.", str(messages)
        )
        later += told is not None
        elsewhere += level.start != drawn.start
        if told and told[1]:  # what is blocked from here, the answer does not try again
            stopped += 1
            assert moved(level, level.start, told[1]) is None and parse_route(text)[0] != told[1]
    assert 0.1 < elsewhere / len(LEVELS) <= later / len(LEVELS) < 0.3 and stopped > 20
    assert "Round" not in str(demonstrations(LEVELS, TEAM, 1, rounds=1))


def test_faults_and_decisions_by_hand():
    level = parse_level("#####\n#A..#\n#.BG#\n#...#\n#####")
    faulty = Counter(suggest(level, 0.0, Random(seed)) for seed in range(300))
    assert blind_route(level) == "DRR" and faulty["DRR"] / 300 == pytest.approx(0.8, abs=0.08)
    assert "DR" not in faulty and all(len(route) == 2 for route in faulty if route != "DRR")
    assert "DRR" not in {suggest(level, 0.0, Random(seed), blocked="D") for seed in range(300)}
    assert suggest(level, 1.0, Random(0)) == "DR" == shortest_route(level)
    assert decide(level, "DR", 0.0, Random(0)) == "DR" == decide(level, "U", 1.0, Random(0))
    # A faulty suggestion is not kept for its own sake: the planner's routes are those of one who plays alone.
    assert {decide(level, "U", 0.0, Random(seed)) for seed in range(300)} == set(faulty)
