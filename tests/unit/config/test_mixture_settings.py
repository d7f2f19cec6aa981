"""What people type for a mixture: which words are folders and weights, how a run records them, what is rejected."""

import json

import pytest

from gpt2lab.config.mixture import Phase, read_sources
from gpt2lab.config.schema import Config, DataConfig
from gpt2lab.config.settings import data_name, find_problems, override, to_flat
from gpt2lab.errors import ConfigError
from tiny import parse

SHARED = ("data_dir", "data_weights_at", "max_source_epochs")


@pytest.fixture(autouse=True)
def _here(monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", ["d:2", "with space", "a:b:c"])
def test_a_single_word_is_a_folder_whatever_its_name(name, tmp_path):
    config = parse(["--data_dir", name]).config
    assert to_flat(config)["data_dir"] == str(tmp_path / name)
    assert read_sources(config.data).folders == (tmp_path / name,)
    assert data_name(config) == name
    assert data_name(parse(["--data_dir", "a/web:1", "code:2"]).config) == "web+code"


def test_a_mixture_is_recorded_in_full_paths_and_plain_numbers(tmp_path):
    words = ["--data_dir", "web:0.70", "../x:y/code:3e-1", "--max_source_epochs", "4", "code:2.5"]
    config = parse([*words, "--data_weights_at", "900M:0,1", "1B:1,1"]).config
    found = json.loads(json.dumps(to_flat(config)))
    assert override(Config(), found) == config
    assert {name: found[name] for name in SHARED} == {
        "data_dir": [f"{tmp_path}/web:0.7", f"{tmp_path}/../x:y/code:0.3"],
        "data_weights_at": ["900000000:0,1", "1000000000:1,1"],
        "max_source_epochs": ["4", "code:2.5"],
    }
    sources = read_sources(override(Config(), found).data)
    assert sources.names == ("web", "code")
    later = (Phase(900_000_000, (0, 1)), Phase(1_000_000_000, (1, 1)))
    assert sources.phases == (Phase(0, (0.7, 0.3)), *later)
    assert sources.max_epochs == (4, 2.5)


def test_typing_what_a_run_has_is_no_change(tmp_path):
    saved = parse(["--data_dir", "a:0.7", "b:0.3", "--data_weights_at", "1M:1,2"]).config
    folders = ("--data_dir", "a:0.70", f"{tmp_path}/b:3e-1")
    again = parse([*folders, "--data_weights_at", "1000k:1,2.0"])
    assert (again.over(saved), parse([]).over(saved)) == (saved, saved)


def test_names_are_as_short_as_may_be_and_a_limit_of_one_source_wins_over_that_of_all():
    def names(*folders: str) -> tuple[str, ...]:
        words = tuple(f"{folder}:1" for folder in folders)
        return read_sources(DataConfig(data_dir=words)).names

    assert names("/x/web", "/y/code") == ("web", "code")
    assert names("/x/web", "/y/web", "/y/code") == ("x/web", "y/web", "y/code")
    assert names("web", "/web") == ("web", "//web")
    for words in (("b:2", "4"), ("4", "b:2")):
        data = DataConfig(data_dir=("a:1", "b:1"), max_source_epochs=words)
        assert read_sources(data).max_epochs == (4.0, 2.0)
    data = parse(["--max_source_epochs", "None", "--data_weights_at", "None"]).config.data
    assert (data.max_source_epochs, data.data_weights_at) == ((), ())


@pytest.mark.parametrize(
    "words",
    [
        *("a:1 b", "a b", "a:1 :2", "", "a:1 b:-1", "a:1 b:nan", "a:1 b:inf", "a:1 b:0"),
        *("a:1 b:1 a:2", "a:1 b/../a:1", "a --data_weights_at 5:1"),
        *("a:1 b:1 --data_weights_at 1k:1", "a:1 b:1 --data_weights_at 0:1,2"),
        "a:1 b:1 --data_weights_at 2k:1,2 1k:1,1",
        *("a:1 b:1 --data_weights_at 2k:0,0", "a:1 b:1 --data_weights_at soon:1,2"),
        *("a --max_source_epochs 0", "a:1 b:1 --max_source_epochs c:2"),
    ],
)
def test_what_makes_no_sense_is_one_line(words, wording):
    try:
        (found,) = find_problems(parse(["--data_dir", *words.split()]).config)
    except ConfigError as error:
        found = str(error)
    wording(found)


def test_fine_tuning_takes_no_mixture():
    for words in ("data_dir a:1 b:1", "data_weights_at 5:1,2", "max_source_epochs 4"):
        with pytest.raises(ConfigError, match=f"--{words.split()[0]} is for pretraining"):
            parse(f"--{words}".split(), "finetune")
