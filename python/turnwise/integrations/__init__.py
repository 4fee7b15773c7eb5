"""Other projects: their environments and agents as tasks and episodes, turnwise's rules and losses in their trainers.

Read in this order: environments, gateway, mcp, verifiers, trainers, verl.
May import: types, utils, sandbox, chat, arena, tasks.
"""
