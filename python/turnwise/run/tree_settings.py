"""Builds the tree that a configuration asks for, and checks that the credit rule supports it."""

from __future__ import annotations

from collections.abc import Sequence

from turnwise.arena import TreeSampler
from turnwise.credit import registry
from turnwise.train.config.sampling import TreeConfig
from turnwise.train.config.schema import TrainConfig
from turnwise.train.config.toml import ConfigError
from turnwise.types import CreditAssigner, CreditCapabilities, capabilities_of
from turnwise.utils.registry import did_you_mean


def sampler_of(config: TrainConfig, actors: Sequence[str]) -> TreeSampler | None:
    """Build the tree of ``rollout.branches`` and ``rollout.tree``, or ``None``. Raises :class:`ConfigError`."""
    branches, tree = config.rollout.branches, config.rollout.tree
    if branches == 1 and tree == TreeConfig():
        return None
    if unknown := [actor for actor in tree.branch_at or () if actor not in actors]:
        raise ConfigError(
            f"config key 'rollout.tree.branch_at': no actor {unknown[0]!r}; {did_you_mean(unknown[0], actors)}"
        )
    if branches == 1 and not tree.playouts:
        raise ConfigError("config key 'rollout.tree': needs rollout.branches > 1, or rollout.tree.playouts > 0")
    try:
        return TreeSampler(
            branches,
            tree.select,
            tree.temperature,
            tree.branch_at,
            beam_width=tree.beam_width,
            score_by=tree.score_by,
            playouts=tree.playouts,
            best_share=tree.best_share,
            share_steps=config.steps,
        )
    except ValueError as error:
        raise ConfigError(f"config key 'rollout.tree': {error}") from error


def tree_problem(credit: CreditAssigner, config: TrainConfig) -> str:
    """Return why the credit rule and the tree of ``config`` are incompatible; an empty string if they fit."""
    branches, tree, rule = config.rollout.branches, config.rollout.tree, config.credit.rule
    can = capabilities_of(credit, CreditCapabilities)
    plain = branches == 1 or (tree.select == "none" and can.ends)
    if not plain and not can.trees:
        either = ", or rollout.tree.select = 'none'" if can.ends else ""
        return (
            f"config key 'credit.rule' = {rule!r}: the rule needs plain trajectories: expected rollout.branches = 1, "
            f"not {branches}{either}"
        )
    if branches > 1 and not can.ends and (tree.select == "none" or tree.beam_width > 1):
        return (
            f"config key 'credit.rule' = {rule!r}: the rule needs one end for each episode: expected "
            "rollout.tree.beam_width = 1, and rollout.tree.select other than 'none'"
        )
    values = getattr(credit, "values_of_states", False)
    if values and branches == 1 and not tree.playouts:
        return (
            f"config key 'credit.rule' = {rule!r}: the rule takes the values of states from the branches of a tree or "
            "from playouts: expected rollout.branches > 1, or rollout.tree.playouts > 0"
        )
    if tree.playouts and not values and rule in registry and tree.score_by != "value":
        return (
            f"config key 'rollout.tree.playouts' = {tree.playouts}: has no effect: expected credit.rule = "
            f"'vine', not {rule!r}, or rollout.tree.score_by = 'value'"
        )
    return ""
