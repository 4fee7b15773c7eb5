"""Finds the file of a user's module, and imports a module from the file that a run recorded."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import sysconfig
import warnings
from contextlib import suppress
from pathlib import Path

from turnwise.utils.values import problem

_INSTALLED = tuple({os.path.realpath(path) for path in sysconfig.get_paths().values()})
_OWN = os.path.realpath(Path(__file__).parents[1])


def search_working_folder() -> None:
    """Add the working folder to Python's path, last, so that it hides no package: a script starts without it."""
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())


def file_of(module: str) -> Path | None:
    """Return the file from which ``module`` was imported, or would be; imports nothing.

    ``None`` for a module without a file, and for one of an installed package, which has the same name everywhere.
    """
    loaded = sys.modules.get(module)
    if loaded is not None:
        found = getattr(loaded, "__file__", None)
    else:
        top, *below = module.split(".")
        spec = None
        with suppress(ImportError, ValueError):
            spec = importlib.util.find_spec(top)
        found = spec.origin if spec is not None else None
        for folder in (spec.submodule_search_locations or ()) if spec is not None and below else ():
            inside = Path(folder, *below)
            files = (inside.with_name(f"{inside.name}.py"), inside / "__init__.py")
            found = next((str(file) for file in files if file.is_file()), None)
    if found is None or not os.path.isfile(found):
        return None
    real = os.path.realpath(found)
    installed = any(real.startswith(folder + os.sep) for folder in (*_INSTALLED, _OWN))
    return None if installed else Path(real)


def import_recorded(module: str, recorded: str) -> None:
    """Import ``module`` from the file that a run recorded for it, wherever this process runs.

    Warns if the file is not on this machine: then the module is searched as usual. Raises ``ValueError`` if this
    process has another module of that name.
    """
    file = Path(recorded)
    if not file.is_file():
        warnings.warn(
            f"the run's code {module!r} was {recorded}, which is not here: {file_of(module)} is used", stacklevel=2
        )
        return
    depth = module.count(".") + (file.name == "__init__.py")
    folder = str(file.absolute().parents[depth])
    # The file's folder takes the place of the working folder, so that the module finds its neighbours, too.
    if folder not in sys.path and not (os.getcwd() == folder and "" in sys.path):
        here = [index for index, entry in enumerate(sys.path) if entry in ("", os.getcwd())]
        sys.path.insert(here[0] if here else len(sys.path), folder)
    importlib.invalidate_caches()
    if module not in sys.modules and file_of(module) != file.resolve():
        sys.path.insert(0, folder)
    try:
        importlib.import_module(module)
    except Exception as error:
        raise ValueError(problem(f"code.{module}", f"{type(error).__name__}: {error}", recorded)) from error
    if file_of(module) != file.resolve():
        why = f"this process has {module!r} from {file_of(module)}: expected one of the two. Give the modules different"
        raise ValueError(problem(f"code.{module}", f"{why} names, or look at one run at a time", recorded))
