from pathlib import Path
import pytest, warnings
pytestmark = pytest.mark.usefixtures("narrow_model")
from .rows import FIRST, accepted, covering
from .test_pairs import broken, config_of
from .test_ranks import Job, runs_of, alone, broken_on_two_ranks

MATES = [{"tree":"best"},{"task":"agent"},{"loop":"ahead"},{"kl":"reward"},{"kl":"loss","policies":"frozen"},{"baseline":"token"},{"entropy":"target","masks":"entropy"},{"layout":"padded"},{"correction":"row","updates":"several"},{"validation":"every"},{"policies":"adapters","dtype":"bfloat16"},{"league":"none","task":"several"},{"observations":"yes","tree":"all"},{"episodes":"saved","loop":"clock"}]

def test_one(tmp_path):
    failed=[]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for n, mate in enumerate(MATES):
            row = FIRST | mate | {"kept": "paper" if n % 2 == 0 else "likely"}
            got = accepted(row)
            if got["kept"] == "all": failed.append(f"{mate}: kept refused"); continue
            why = broken(got, tmp_path / "run")
            if why: failed.append(f"{mate}: {why[:1500]}")
    assert not failed, "\n".join(failed)

def test_two(tmp_path, warm_python, tasks):
    rows = [accepted(FIRST | mate | {"kept": "paper"}, ranks=2) for mate in MATES[:6]]
    failed = broken_on_two_ranks(rows, tmp_path / "run", warm_python, tasks)
    assert not failed, "\n".join(failed)
