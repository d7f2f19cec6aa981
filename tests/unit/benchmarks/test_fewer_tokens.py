"""Tokens to another model's loss: what lies between runs, what is rejected."""

import json

import pytest

from benchmarks import fewer_tokens
from benchmarks.fewer_tokens import End
from gpt2lab.errors import CheckError


def test_tokens_lie_between_two_complete_runs_by_their_logarithm():
    """A loss outside the runs is an error, not a guess."""
    # A nat less each time the tokens double; a second to begin with, and one for each 100 tokens.
    ends = [End(400, 3.0, 5.0), End(100, 5.0, 2.0), End(200, 4.0, 3.0)]
    tokens = 100 * 2**0.5
    assert fewer_tokens.reach(ends, 4.5) == pytest.approx((tokens, 1 + tokens / 100))
    assert fewer_tokens.reach(ends, 3.0) == pytest.approx((400, 5))
    assert fewer_tokens.reach([End(100, 3.0, 1.0), End(200, 3.0, 2.0)], 3.0) == (100, 1)
    for loss in (5.1, 2.9):
        with pytest.raises(CheckError, match=r"between 5\.0000 after 100, 3\.0000 after 400; add"):
            fewer_tokens.reach([ends[0], ends[1]], loss)


def test_ratios_are_taken_seed_by_seed(tmp_path):
    def setting(tokens: int, *losses: float) -> dict[str, object]:
        seconds = [0.0, tokens**0.5]
        curves = [{"tokens": [1, tokens], "seconds": seconds, "losses": [9.0, x]} for x in losses]
        return {"setting": f"m-{tokens > 400}_x", "curves": curves}

    table = tmp_path / "ablation.json"
    settings = [setting(1000, 3.0, 5.0), setting(100, 4.0, 6.0), setting(400, 2.0, 4.0)]
    table.write_text(json.dumps({"settings": settings}))
    found = fewer_tokens.read(table)
    assert [tokens for tokens, _ in found.reached] == pytest.approx([200, 200])
    assert found.ratio.mean == pytest.approx(0.2)
    assert found.ratio.half_width == pytest.approx(0)  # though the seeds' losses are 2 nats apart
    assert found.seconds_ratio.mean == pytest.approx((10 + 10 / 3) / 1000**0.5)
    base, model = fewer_tokens.points([found])["settings"]
    assert (base["setting"], model["setting"]) == ("m-True", "m-False")
    assert model["curves"][1] == {"tokens": [100, 400], "seconds": [10, 20], "losses": [6.0, 4.0]}
    with pytest.raises(CheckError, match=r"ablation[.]json exists; name another folder"):
        fewer_tokens.main([str(table), "--points", str(tmp_path)])
    settings[1]["curves"] = [None, None]  # as ablate writes a run that diverged
    table.write_text(json.dumps({"settings": settings}))
    with pytest.raises(CheckError, match="a run diverged"):
        fewer_tokens.read(table)
    table.write_text("{}")
    with pytest.raises(CheckError, match="no table that ablate wrote"):
        fewer_tokens.read(table)
