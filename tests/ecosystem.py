"""README's table of what gpt2lab works with: each row is written by a test that starts the real library or program.

A test says so with one line: `works_with("peft", version("peft"), "what was compared")`. To record a row or version:

    UPDATE_GOLDEN=1 pytest -n 0 -m "slow or not slow" PATH::TEST
    python tests/ecosystem.py
"""

import json
import os
from pathlib import Path
from typing import Literal

REPOSITORY = Path(__file__).resolve().parents[1]
GOLDEN = REPOSITORY / "tests" / "golden" / "ecosystem.json"
_BEGIN, _END = "<!-- written by tests/ecosystem.py -->\n", "<!-- end -->\n"


def works_with(
    name: str, version: str, what: str, compare: Literal["major", "name"] = "major"
) -> None:
    """Record that the test that runs now has used `version` of `name`, or check that the golden file says so.

    `compare`: another major version fails; `name` for a program of the system that nobody pins, such as a browser.
    """
    test = os.environ["PYTEST_CURRENT_TEST"].partition(" ")[0].partition("[")[0]
    rows = read_rows()
    if os.environ.get("UPDATE_GOLDEN") == "1":
        rows[name] = {"version": version, "what": what, "test": test}
        GOLDEN.write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n")
    row = rows.get(name)
    assert row is not None, (
        f"tests/golden/ecosystem.json has no {name}; tests/ecosystem.py says how to record it"
    )
    assert (row["what"], row["test"]) == (what, test), (
        f"{name}: tests/ecosystem.py says how to record a change"
    )
    if compare == "major":
        assert row["version"].split(".")[0] == version.split(".")[0], f"{name}: other major version"


def read_rows() -> dict[str, dict[str, str]]:
    return json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}


def table() -> str:
    """Return the table of the README."""
    lines = ["| works with | tested version | what is tested | test |", "| --- | --- | --- | --- |"]
    for name, row in sorted(read_rows().items(), key=lambda item: item[0].lower()):
        file = Path(row["test"].partition("::")[0])
        lines.append(f"| {name} | {row['version']} | {row['what']} | [{file.stem}]({file}) |")
    return "\n".join(lines) + "\n"


def with_table(page: str) -> str:
    """Return a page with its table written anew between the two marks."""
    before, _, rest = page.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    assert after, "the page has no place for the table"
    return f"{before}{_BEGIN}\n{table()}\n{_END}{after}"


if __name__ == "__main__":
    readme = REPOSITORY / "README.md"
    readme.write_text(with_table(readme.read_text()))
