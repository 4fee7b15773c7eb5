"""Arena workers: other processes play a run's top episodes, with the results that one arena would have.

Read in this order: messages, wire, secrets, stores, snapshots, engines, listen, link, waiting, remote.
May import: types, utils, chat, arena, inference.
"""
