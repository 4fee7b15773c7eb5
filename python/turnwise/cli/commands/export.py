"""``turnwise export``: write the policies of a checkpoint as Hugging Face folders, and push one to the Hub."""

from __future__ import annotations

import argparse

from turnwise.cli.options import EXIT_OK
from turnwise.run.export import chosen_policies, export_checkpoint, find_exported
from turnwise.run.hub import check_push, push, write_card
from turnwise.train.config.toml import CONFIG_FILE
from turnwise.train.validate import read_config


def run(options: argparse.Namespace) -> int:
    config = read_config(options.run_dir / CONFIG_FILE, import_code=False)
    config = config.model_copy(update={"run_dir": options.run_dir})
    policies = chosen_policies(config, options.policy)
    # Refuse a push that can't succeed before anything is written.
    if options.push is None and (options.private or options.revision is not None):
        raise ValueError("--private, --revision: expected --push with them")
    if options.push is not None:
        if len(policies) > 1:
            raise ValueError(f"--push {options.push}: expected one of {', '.join(policies)} with --policy, got all")
        check_push(config, policies[0], merge=options.merge)
    checkpoint = find_exported(config, options.checkpoint)
    out = options.out or options.run_dir / "export" / checkpoint.name
    exported, manifest = export_checkpoint(config, out, checkpoint, only=policies, merge=options.merge)
    for one in exported:
        write_card(one, config, manifest, options.push)
        kind = f"an adapter over {one.base}" if one.base else "a whole model"
        print(f"policy {one.policy!r} of step {manifest['step']}: {one.folder}, {kind}")
    if options.push is not None:
        address = push(exported[0].folder, options.push, private=options.private, revision=options.revision)
        print(f"pushed to {address}")
    return EXIT_OK
